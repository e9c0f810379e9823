"""A double of an object store for tests: gs:// paths whose objects are put whole; nothing can be appended to or renamed."""

import fnmatch
import io

from etils.epath import gpath, stat_utils


class Store:
    """A backend of `etils.epath`; `objects` maps the whole path to its bytes. A folder is there while an object lies under it."""

    def __init__(self):
        self.objects: dict[str, bytes] = {}

    def open(self, path, mode):
        path, kind = str(path), mode.replace("b", "")
        if kind == "r":
            if path not in self.objects:
                raise FileNotFoundError(path)
            data = io.BytesIO(self.objects[path])
            return data if "b" in mode else io.TextIOWrapper(data, encoding="utf-8")
        assert kind == "w", f"{path}: opened to {mode}, which a store cannot do"
        put = lambda data: self.objects.__setitem__(path, data)
        return _Upload(put) if "b" in mode else io.TextIOWrapper(_Upload(put), encoding="utf-8")

    def exists(self, path):
        return str(path) in self.objects or self.isdir(path)

    def isdir(self, path):
        return any(name.startswith(f"{str(path).rstrip('/')}/") for name in self.objects)

    def listdir(self, path):
        start = f"{str(path).rstrip('/')}/"
        return sorted({name.removeprefix(start).split("/")[0] for name in self.objects if name.startswith(start)})

    def glob(self, path):
        return sorted(
            name
            for name in self.objects
            if fnmatch.fnmatch(name, str(path)) and name.count("/") == str(path).count("/")
        )

    def makedirs(self, path, *, exist_ok, mode=None):
        pass

    mkdir = makedirs

    def remove(self, path):
        del self.objects[str(path)]

    def stat(self, path):
        return stat_utils.StatResult(is_directory=self.isdir(path), length=len(self.objects[str(path)]), mtime=0)

    def rename(self, path, target):
        raise AssertionError(f"{path} is renamed to {target}, which a store cannot do")

    replace = rename


class _Upload(io.BytesIO):
    """The object is there once the upload is closed."""

    def __init__(self, put):
        super().__init__()
        self._put = put

    def close(self):
        if not self.closed:
            self._put(self.getvalue())
        super().close()


def install(monkeypatch) -> Store:
    store = Store()
    monkeypatch.setitem(gpath._PREFIX_TO_BACKEND, "gs", store)
    monkeypatch.setattr(gpath, "_is_tf_installed", lambda: False)
    return store
