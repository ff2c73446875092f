/* Mounts as descriptors: made where the rights are, attached where the path is. No path of the image is ever given to a call
 * that would follow it out of the image. */
#include <linux/fcntl.h>
#include <linux/mount.h>
#include <linux/openat2.h>
#include <linux/stat.h>

#include "native.h"

enum { O_PATH_ = 010000000, O_CLOEXEC_ = 02000000 };
enum { IDMAP = 0x100000 };

struct attributes {
    uint64_t set, clear, propagation, userns;
};

/* OPTIONS is cut into pieces: `name=value` or `name`, separated by commas. */
int new_filesystem(struct worker *worker, const char *type, uint64_t attributes, char *options)
{
    int context = (int)need(worker, CALL(fsopen, type, FSOPEN_CLOEXEC));
    need(worker, CALL(fsconfig, context, FSCONFIG_SET_STRING, "source", type, 0));
    while (*options) {
        char *name = options, *value = NULL;
        while (*options && *options != ',') {
            if (*options == '=' && !value) {
                *options = '\0';
                value = options + 1;
            }
            options++;
        }
        if (*options)
            *options++ = '\0';
        need(worker, CALL(fsconfig, context, value ? FSCONFIG_SET_STRING : FSCONFIG_SET_FLAG, name, value, 0));
    }
    need(worker, CALL(fsconfig, context, FSCONFIG_CMD_CREATE, NULL, NULL, 0));
    int mount = (int)need(worker, CALL(fsmount, context, FSMOUNT_CLOEXEC, attributes));
    CALL(close, context);
    return mount;
}

/* A copy of a mounted tree; USERNS -1: ids stay as they are. */
int clone_tree(struct worker *worker, int at, const char *path, unsigned flags, uint64_t attributes, int userns)
{
    int tree = (int)CALL(open_tree, at, path, OPEN_TREE_CLONE | (unsigned)O_CLOEXEC_ | flags);
    if (tree == -EINVAL && userns < 0) { /* what is mounted below it hides something from us, and may not be left out */
        flags |= AT_RECURSIVE;
        tree = (int)CALL(open_tree, at, path, OPEN_TREE_CLONE | (unsigned)O_CLOEXEC_ | flags);
    }
    need(worker, tree);
    struct attributes change = {.set = attributes};
    if (userns >= 0) {
        change.set |= IDMAP;
        change.userns = (uint64_t)userns;
    }
    if (change.set)
        need(worker, CALL(mount_setattr, tree, "", AT_EMPTY_PATH | (flags & AT_RECURSIVE), &change, sizeof change));
    return tree;
}

long attach(int mount, int at, const char *path)
{
    return CALL(move_mount, mount, "", at, path, MOVE_MOUNT_F_EMPTY_PATH | (*path ? 0 : MOVE_MOUNT_T_EMPTY_PATH));
}

/* PATH below ROOT, as if ROOT were /: neither a link nor `..` leads out of it. */
int open_inside(int root, const char *path, uint64_t resolve, int flags)
{
    struct open_how how = {.flags = (uint64_t)(unsigned)(flags | O_CLOEXEC_),
                           .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS | resolve};
    return (int)CALL(openat2, root, path, &how, sizeof how);
}

bool is_directory(struct worker *worker, int fd)
{
    struct statx found;
    need(worker, CALL(statx, fd, "", AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW, STATX_TYPE, &found));
    return (found.stx_mode & S_IFMT) == S_IFDIR;
}

/* The first LENGTH bytes of PATH as a path of their own. */
static long cut(char *to, size_t room, const char *path, size_t length)
{
    if (length >= room)
        return -ENAMETOOLONG;
    memcpy(to, path, length);
    to[length] = '\0';
    return 0;
}

/* Open PATH step by step and make what is missing. */
static int make_path(int root, const char *path, bool directory, uint64_t resolve)
{
    char parent[LONGEST_PATH], name[LONGEST_NAME + 1];
    int here = open_inside(root, "/", 0, O_PATH_);
    for (size_t at = 0; here >= 0 && path[at];) {
        while (path[at] == '/')
            at++;
        size_t end = at, after;
        while (path[end] && path[end] != '/')
            end++;
        if (end == at)
            break;
        for (after = end; path[after] == '/';)
            after++;
        long error = cut(parent, sizeof parent, path, end);
        if (!error)
            error = cut(name, sizeof name, path + at, end - at);
        int deeper = error ? (int)error : open_inside(root, parent, resolve, O_PATH_);
        if (deeper == -ENOENT) {
            error = !path[after] && !directory ? CALL(mknodat, here, name, S_IFREG | 0644, 0)
                                               : CALL(mkdirat, here, name, 0755);
            deeper = error ? (int)error : open_inside(root, parent, resolve, O_PATH_);
        }
        CALL(close, here);
        here = deeper;
        at = end;
    }
    return here;
}

/* Where to mount, made if it is missing; an error if it is of the wrong kind. `strict`: no symbolic link on the way. */
int mount_point(struct worker *worker, int root, const char *path, bool directory, bool strict)
{
    uint64_t resolve = strict ? RESOLVE_NO_SYMLINKS : 0;
    int fd = open_inside(root, path, resolve, O_PATH_);
    if (fd == -ENOENT)
        fd = make_path(root, path, directory, resolve);
    if (need(worker, fd) >= 0 && is_directory(worker, fd) != directory)
        worker->give_up(worker, directory ? ENOTDIR : EISDIR);
    return fd;
}
