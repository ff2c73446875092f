/* Paths of the image. The image is not trusted: its paths are only passed to calls that cannot follow them out of the image. */
#include "core.h"

/* Open PATH below ROOT, as if ROOT were /: neither a link nor `..` leads out of it. */
int open_inside(int root, const char *path, uint64_t resolve, int flags)
{
    struct open_how how = {.flags = (uint64_t)(unsigned)(flags | O_CLOEXEC),
                           .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS | resolve};
    return (int)CALL(openat2, root, path, &how, sizeof how);
}

bool is_directory(struct worker *worker, int fd)
{
    struct statx found;
    need(worker, CALL(statx, fd, "", AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW, STATX_TYPE, &found));
    return (found.stx_mode & S_IFMT) == S_IFDIR;
}

/* Copy the first LENGTH bytes of PATH to TO. */
static long cut(char *to, size_t room, const char *path, size_t length)
{
    if (length >= room)
        return -ENAMETOOLONG;
    memcpy(to, path, length);
    to[length] = '\0';
    return 0;
}

/* Open PATH component by component, creating what is missing. */
static int make_path(int root, const char *path, bool directory, uint64_t resolve)
{
    char parent[MAX_PATH], name[MAX_NAME + 1];
    int here = open_inside(root, "/", 0, O_PATH);
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
        int deeper = error ? (int)error : open_inside(root, parent, resolve, O_PATH);
        if (deeper == -ENOENT) {
            error = !path[after] && !directory ? CALL(mknodat, here, name, S_IFREG | 0644, 0)
                                               : CALL(mkdirat, here, name, 0755);
            deeper = error ? (int)error : open_inside(root, parent, resolve, O_PATH);
        }
        CALL(close, here);
        here = deeper;
        at = end;
    }
    return here;
}

/* Open a mount point, created if it is missing. Fails if it is of the wrong type. `strict`: follow no symbolic link. */
int mount_point(struct worker *worker, int root, const char *path, bool directory, bool strict)
{
    uint64_t resolve = strict ? RESOLVE_NO_SYMLINKS : 0;
    int fd = open_inside(root, path, resolve, O_PATH);
    if (fd == -ENOENT)
        fd = make_path(root, path, directory, resolve);
    if (need(worker, fd) >= 0 && is_directory(worker, fd) != directory)
        worker->give_up(worker, directory ? ENOTDIR : EISDIR);
    return fd;
}

void write_text(struct worker *worker, int fd, const char *text)
{
    if ((size_t)need(worker, CALL(write, fd, text, strlen(text))) != strlen(text))
        worker->give_up(worker, EINVAL);
}

/* Write TEXT to a file of the host. */
void write_file(struct worker *worker, const char *path, const char *text)
{
    int fd = (int)need(worker, CALL(openat, AT_FDCWD, path, O_WRONLY | O_CLOEXEC, 0));
    write_text(worker, fd, text);
    CALL(close, fd);
}
