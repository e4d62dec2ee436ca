"""Whether other users of this machine could change a file that is about to be used."""

import os
import stat
from pathlib import Path


def find_writers(path: Path, *, trust_owner: bool = False) -> str | None:
    """Return which other users could change a file or folder, or replace it; None if none.

    A missing path is judged by the folder in which it would be created. The own group may
    write if nobody else is in it, as where every user has a group of their own. Users who
    could write anyway, such as root, do not count.

    Args:
        path: A file or folder.
        trust_owner: Whether another user may own it, as a shared folder of datasets.
    """
    if os.name != "posix":
        return None
    links = _find_links(path)
    path = Path(os.path.realpath(path))
    for each in (path, *path.parents, *links):
        try:
            found = os.lstat(each)
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{each} cannot be checked ({error.strerror})"
        is_parent = each != path
        reason = _describe_writers(each, found, is_parent, trust_owner)
        if reason is not None:
            return reason
    return None


def _find_links(path: Path) -> list[Path]:
    """Return the links in a path, and all folders that they are in.

    Whoever could replace a link could lead it elsewhere.
    """
    path = Path(os.path.abspath(path))
    links = [each for each in (path, *path.parents) if os.path.islink(each)]
    folders = [Path(os.path.realpath(link.parent)) for link in links]
    return [*links, *folders, *(each for folder in folders for each in folder.parents)]


def _describe_writers(
    path: Path, found: os.stat_result, is_parent: bool, trust_owner: bool
) -> str | None:
    if found.st_uid not in (0, os.geteuid()) and not trust_owner:
        return f"{path} belongs to {_user_name(found.st_uid)}"
    if stat.S_ISLNK(found.st_mode):
        return None  # the bits of a link have no meaning
    # In a folder with the sticky bit, such as /tmp, nobody can rename the files of others.
    if is_parent and found.st_mode & stat.S_ISVTX:
        return None
    if found.st_mode & stat.S_IWOTH:
        return f"every user may write to {path}"
    if found.st_mode & stat.S_IWGRP and not (trust_owner or _is_own_group(found.st_gid)):
        return f"the group {found.st_gid} may write to {path}"
    return None


def _user_name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _is_own_group(gid: int) -> bool:
    """Whether nobody but this user is in a group."""
    import grp
    import pwd

    if gid == 0:
        return True
    try:
        own = pwd.getpwuid(os.geteuid())
        others = set(grp.getgrgid(gid).gr_mem) - {own.pw_name}
    except KeyError:
        return False
    primary = {user.pw_name for user in pwd.getpwall() if user.pw_gid == gid}
    return not others and primary <= {own.pw_name}
