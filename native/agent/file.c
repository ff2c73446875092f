/* Files: operations that need only one or two system calls, and functions that the other file operations share.
 *
 * Every path is resolved here, inside the sandbox, with the rights of any other program in it. Nothing is opened in a way
 * that could block: only regular files are read or written.
 */
#define _GNU_SOURCE
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

unsigned kind_of(mode_t mode)
{
    switch (mode & S_IFMT) {
    case S_IFREG: return 'f';
    case S_IFDIR: return 'd';
    case S_IFLNK: return 'l';
    case S_IFIFO: return 'p';
    case S_IFSOCK: return 's';
    case S_IFCHR: return 'c';
    default: return 'b';
    }
}

int64_t mtime_of(const struct stat *info)
{
    int64_t seconds = info->st_mtim.tv_sec, most = INT64_MAX / 1000000000 - 1;
    if (seconds > most || seconds < -most) /* file systems can store times that do not fit into nanoseconds */
        seconds = seconds > 0 ? most : -most;
    return seconds * 1000000000 + info->st_mtim.tv_nsec;
}

int open_folder(int root, const char *path, size_t length)
{
    char name[NAME_MAX + 1];
    int folder = openat(root, ".", O_PATH | O_DIRECTORY | O_CLOEXEC);
    for (const char *at = path, *end = path + length; folder >= 0 && at < end;) {
        size_t part = strcspn(at, "/");
        if (part > (size_t)(end - at))
            part = (size_t)(end - at);
        int below = -1;
        errno = ENAMETOOLONG;
        if (part <= NAME_MAX) {
            memcpy(name, at, part);
            name[part] = 0;
            below = openat(folder, name, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        }
        int error = errno;
        close(folder);
        errno = error;
        folder = below;
        at += part + 1;
    }
    return folder;
}

/* Like mkdir -p for all but the last part of the path. */
int make_parents(char *path)
{
    for (char *slash = path + 1; (slash = strchr(slash, '/')); slash++) {
        *slash = 0;
        int result = mkdir(path, 0755);
        int error = errno;
        *slash = '/';
        if (result < 0 && error != EEXIST && error != EISDIR && error != EROFS && error != EACCES && error != EPERM)
            return errno = error, -1;
        /* With the last three errors the directory may exist; if it does not, the caller's next step fails. */
    }
    return 0;
}

int open_regular(const char *path, int flags, struct stat *info)
{
    /* Check the type before opening, because opening a fifo or a device has side effects. */
    if (stat(path, info) == 0 && !S_ISREG(info->st_mode))
        return errno = S_ISDIR(info->st_mode) ? EISDIR : EINVAL, -1;
    int fd = open(path, flags | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0600);
    if (fd < 0)
        return -1;
    info->st_mode = 0;
    if (fstat(fd, info) < 0 || !S_ISREG(info->st_mode)) {
        int error = S_ISDIR(info->st_mode) ? EISDIR : EINVAL;
        close(fd);
        return errno = error, -1;
    }
    return fd;
}

static void answer_stat(struct stream *stream, const char *path, bool follow)
{
    struct builder fields;
    struct stat info;
    fields.length = 0;
    if (fstatat(AT_FDCWD, path, &info, follow ? 0 : AT_SYMLINK_NOFOLLOW) < 0) {
        stream_fail(stream, errno, path);
        return;
    }
    uint8_t kind = (uint8_t)kind_of(info.st_mode);
    add_bytes(&fields, TAG_KIND, &kind, 1);
    add_number(&fields, TAG_MODE, info.st_mode & 07777);
    add_number(&fields, TAG_UID, info.st_uid);
    add_number(&fields, TAG_GID, info.st_gid);
    add_number(&fields, TAG_SIZE, (uint64_t)info.st_size);
    add_number(&fields, TAG_MTIME_NS, (uint64_t)mtime_of(&info));
    add_number(&fields, TAG_NLINK, info.st_nlink);
    add_number(&fields, TAG_INODE, info.st_ino);
    add_number(&fields, TAG_DEVICE, info.st_dev);
    if (S_ISLNK(info.st_mode)) {
        char target[PATH_MAX];
        ssize_t length = readlink(path, target, sizeof target);
        if (length > 0)
            add_bytes(&fields, TAG_TARGET, target, (size_t)length);
    }
    stream_finish(stream, &fields);
}

static int make_directory(char *path, mode_t mode, bool parents)
{
    struct stat info;
    if (parents && make_parents(path) < 0)
        return -1;
    if (mkdir(path, mode) == 0)
        return chmod(path, mode); /* regardless of the umask */
    if (parents && errno == EEXIST && stat(path, &info) == 0 && S_ISDIR(info.st_mode))
        return 0;
    return -1;
}

static int move(const char *from, char *to, bool parents)
{
    if (parents && make_parents(to) < 0)
        return -1;
    return rename(from, to);
}

static int change_owner(const char *path, struct fields fields)
{
    uint64_t uid = fields_number_or(fields, TAG_UID, UINT32_MAX), gid = fields_number_or(fields, TAG_GID, UINT32_MAX);
    if (uid > UINT32_MAX || gid > UINT32_MAX) /* truncated, it would be another id */
        return errno = EINVAL, -1;
    return lchown(path, (uid_t)uid, (gid_t)gid);
}

/* Handle the requests that need only one or two system calls. */
void file_simple(struct stream *stream, unsigned operation, struct fields fields)
{
    char path[PATH_MAX], target[PATH_MAX];
    uint64_t flags = fields_number_or(fields, TAG_FLAGS, 0);
    mode_t mode = (mode_t)fields_number_or(fields, TAG_MODE, 0755) & 07777;
    char *link_text = NULL;
    int result = -1;
    if (fields_path(fields, TAG_PATH, path) < 0) {
        stream_fail(stream, errno, "PATH");
        return;
    }
    switch (operation) {
    case OP_STAT: answer_stat(stream, path, flags & 1); return;
    case OP_MKDIR: result = make_directory(path, mode, flags & 1); break;
    case OP_RENAME: result = fields_path(fields, TAG_TARGET, target) < 0 ? -1 : move(path, target, flags & 1); break;
    case OP_CHMOD: result = chmod(path, mode); break;
    case OP_CHOWN: result = change_owner(path, fields); break;
    case OP_SYMLINK:
        link_text = fields_text(fields, TAG_TARGET, PATH_MAX - 1);
        result = link_text ? symlink(link_text, path) : -1;
        break;
    default: errno = ENOSYS;
    }
    int error = errno;
    free(link_text);
    if (result < 0)
        stream_fail(stream, error, path);
    else
        stream_finish(stream, NULL);
}
