/* Files: small requests, reading, writing and removing.
 *
 * Every path is resolved here, inside the sandbox, by the same kernel rules that bind any other program in it. Nothing is
 * opened in a way that could block: only regular files are read or written.
 */
#define _GNU_SOURCE
#include "agent.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { READ_CHUNK = 128 * 1024, REMOVALS_PER_TURN = 256, LEVELS_KEPT_OPEN = 16 };

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
    if (seconds > most || seconds < -most) /* file systems can hold times that we cannot */
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
        /* With the last three it may exist; if it does not, the caller's own step says so. */
    }
    return 0;
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
        return chmod(path, mode); /* whatever our umask is */
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
    if (uid > UINT32_MAX || gid > UINT32_MAX) /* cut off, it would be somebody else */
        return errno = EINVAL, -1;
    return lchown(path, (uid_t)uid, (gid_t)gid);
}

/* The requests that are one or two system calls. */
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

/* --- reading -------------------------------------------------------------------------------------------------------------- */

struct reader {
    int fd;
    uint64_t offset, left;
    char path[];
};

static bool reader_pump(struct stream *stream)
{
    struct reader *reader = stream->owner;
    size_t room;
    if (!reader->left) {
        stream_finish(stream, NULL);
        return false;
    }
    uint8_t *payload = stream_reserve(stream, reader->left < READ_CHUNK ? (size_t)reader->left : READ_CHUNK, &room);
    if (!payload)
        return false;
    ssize_t length = pread(reader->fd, payload, room, (off_t)reader->offset);
    if (length < 0) {
        stream_fail(stream, errno, reader->path);
        return false;
    }
    stream_commit(stream, 0, (size_t)length);
    reader->offset += (uint64_t)length;
    reader->left = length ? reader->left - (uint64_t)length : 0;
    return true;
}

static void reader_closed(struct stream *stream)
{
    struct reader *reader = stream->owner;
    close(reader->fd);
    free(reader);
}

static int open_regular(const char *path, int flags, struct stat *info)
{
    /* Looked at before it is opened: to open a fifo or a device already does something to it. */
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

void file_read(struct stream *stream, struct fields fields)
{
    static const struct stream_ops ops = {.pump = reader_pump, .closed = reader_closed};
    char path[PATH_MAX] = "PATH";
    struct stat info;
    struct builder event;
    int fd = fields_path(fields, TAG_PATH, path) < 0 ? -1 : open_regular(path, O_RDONLY, &info);
    if (fd < 0) {
        stream_fail(stream, errno, path);
        return;
    }
    struct reader *reader = malloc(sizeof *reader + strlen(path) + 1);
    if (!reader) {
        close(fd);
        stream_fail(stream, ENOMEM, path);
        return;
    }
    reader->fd = fd;
    reader->offset = fields_number_or(fields, TAG_OFFSET, 0);
    reader->left = fields_number_or(fields, TAG_LENGTH, UINT64_MAX);
    strcpy(reader->path, path);
    event.length = 0;
    add_number(&event, TAG_SIZE, (uint64_t)info.st_size);
    add_number(&event, TAG_MODE, info.st_mode & 07777);
    add_number(&event, TAG_MTIME_NS, (uint64_t)mtime_of(&info));
    stream_serve(stream, &ops, reader);
    stream_event(stream, EVENT_FILE, &event);
    stream_wake(stream);
}

/* --- writing --------------------------------------------------------------------------------------------------------------- */

enum { WRITE_PARENTS = 1, WRITE_IN_PLACE = 2, WRITE_EXCLUSIVE = 4, WRITE_APPEND = 8 };

struct writer {
    int fd;
    bool exclusive;
    uint64_t written;
    char path[PATH_MAX];
    char temporary[PATH_MAX]; /* empty when writing in place */
};

static void writer_closed(struct stream *stream)
{
    struct writer *writer = stream->owner;
    close(writer->fd);
    if (writer->temporary[0])
        unlink(writer->temporary); /* the host went away, or it failed: as if never tried */
    free(writer);
}

static int write_all(int fd, const uint8_t *bytes, size_t length)
{
    while (length) {
        ssize_t written = write(fd, bytes, length);
        if (written < 0 && errno == EINTR)
            continue;
        if (written <= 0)
            return -1;
        bytes += written;
        length -= (size_t)written;
    }
    return 0;
}

static void writer_data(struct stream *stream, const uint8_t *bytes, size_t length)
{
    struct writer *writer = stream->owner;
    if (write_all(writer->fd, bytes, length) < 0) {
        stream_fail(stream, errno, writer->path);
        return;
    }
    writer->written += length;
    stream_consumed(stream, length);
}

/* The target is a mount point of its own and cannot be replaced: copy into it. */
static int copy_over(struct writer *writer)
{
    struct stat info;
    int fd = open_regular(writer->path, O_WRONLY | O_TRUNC, &info);
    off_t offset = 0;
    int result = fd < 0 ? -1 : 0;
    while (result == 0 && (uint64_t)offset < writer->written)
        if (sendfile(fd, writer->fd, &offset, 1 << 20) <= 0)
            result = -1;
    int error = errno;
    if (fd >= 0)
        close(fd);
    return errno = error, result;
}

/* Give the temporary file its name. */
static int put_in_place(struct writer *writer)
{
    int result;
    if (writer->exclusive) { /* something may have got that name meanwhile */
        result = (int)syscall(SYS_renameat2, AT_FDCWD, writer->temporary, AT_FDCWD, writer->path, 1 /* RENAME_NOREPLACE */);
        if (result < 0 && (errno == EINVAL || errno == ENOSYS))
            return link(writer->temporary, writer->path);
    } else {
        result = rename(writer->temporary, writer->path);
        if (result < 0 && errno == EBUSY)
            return copy_over(writer);
    }
    if (result == 0)
        writer->temporary[0] = 0;
    return result;
}

static void writer_end(struct stream *stream)
{
    struct writer *writer = stream->owner;
    struct builder fields;
    if (writer->temporary[0] && put_in_place(writer) < 0) {
        stream_fail(stream, errno, writer->path);
        return;
    }
    fields.length = 0;
    add_number(&fields, TAG_SIZE, writer->written);
    stream_finish(stream, &fields);
}

static int open_temporary(struct writer *writer, const struct stat *old, int64_t mode)
{
    const char *slash = strrchr(writer->path, '/');
    uint64_t random;
    if (getrandom(&random, sizeof random, 0) != sizeof random)
        return -1;
    if (snprintf(writer->temporary, sizeof writer->temporary, "%.*s/.atoll-%016llx", (int)(slash - writer->path), writer->path,
                 (unsigned long long)random) >= (int)sizeof writer->temporary) {
        writer->temporary[0] = 0;
        return errno = ENAMETOOLONG, -1;
    }
    int fd = open(writer->temporary, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0) {
        writer->temporary[0] = 0;
        return -1;
    }
    mode_t wanted = mode >= 0 ? (mode_t)mode : old ? old->st_mode & 07777 : 0644;
    if ((old && fchown(fd, old->st_uid, old->st_gid) < 0 && errno != EPERM) || fchmod(fd, wanted) < 0) {
        int error = errno;
        close(fd);
        return errno = error, -1;
    }
    return fd;
}

static int open_in_place(struct writer *writer, uint64_t flags, uint64_t offset, int64_t mode)
{
    struct stat info;
    bool exists = access(writer->path, F_OK) == 0;
    int how = O_WRONLY | O_CREAT | (flags & WRITE_EXCLUSIVE ? O_EXCL : 0) | (flags & WRITE_APPEND ? O_APPEND : 0);
    int fd = open_regular(writer->path, how, &info);
    if (fd < 0)
        return -1;
    if (((!exists || mode >= 0) && fchmod(fd, mode >= 0 ? (mode_t)mode : 0644) < 0)
        || (!(flags & WRITE_APPEND) && lseek(fd, (off_t)offset, SEEK_SET) < 0)) {
        int error = errno;
        close(fd);
        return errno = error, -1;
    }
    return fd;
}

static int open_target(struct writer *writer, uint64_t flags, uint64_t offset, int64_t mode)
{
    struct stat old;
    writer->exclusive = flags & WRITE_EXCLUSIVE;
    if (flags & WRITE_PARENTS && make_parents(writer->path) < 0)
        return -1;
    if (flags & (WRITE_IN_PLACE | WRITE_APPEND))
        return open_in_place(writer, flags, offset, mode);
    if (lstat(writer->path, &old) < 0)
        return errno == ENOENT ? open_temporary(writer, NULL, mode) : -1;
    if (writer->exclusive)
        return errno = EEXIST, -1;
    if (S_ISLNK(old.st_mode)) { /* replace what the link means, not the link */
        char resolved[PATH_MAX];
        if (!realpath(writer->path, resolved))
            return errno == ENOENT ? open_in_place(writer, 0, 0, mode) : -1;
        strcpy(writer->path, resolved);
        if (stat(writer->path, &old) < 0)
            return -1;
    }
    if (!S_ISREG(old.st_mode))
        return errno = S_ISDIR(old.st_mode) ? EISDIR : EINVAL, -1;
    return open_temporary(writer, &old, mode);
}

void file_write(struct stream *stream, struct fields fields)
{
    static const struct stream_ops ops = {.data = writer_data, .end = writer_end, .closed = writer_closed};
    struct writer *writer = calloc(1, sizeof *writer);
    if (!writer || fields_path(fields, TAG_PATH, writer->path) < 0) {
        int error = writer ? errno : ENOMEM;
        free(writer);
        stream_fail(stream, error, "PATH");
        return;
    }
    uint64_t mode = fields_number_or(fields, TAG_MODE, UINT64_MAX);
    writer->fd = open_target(writer, fields_number_or(fields, TAG_FLAGS, 0), fields_number_or(fields, TAG_OFFSET, 0),
                             mode == UINT64_MAX ? -1 : (int64_t)(mode & 07777));
    if (writer->fd < 0) {
        int error = errno;
        if (writer->temporary[0])
            unlink(writer->temporary);
        stream_fail(stream, error, writer->path);
        free(writer);
        return;
    }
    stream_serve(stream, &ops, writer);
    stream_grant(stream, 3 * WINDOW);
}

/* --- removing ---------------------------------------------------------------------------------------------------------------- */

/* A tree is removed a few entries at a time, so that others get their turn, and without recursion: we stand in one directory and
 * remember those above. The upper ones stay open; to the others we go back through "..". If that is not where we came from, somebody
 * has moved the tree while we were in it, and we stop: what is there now was never meant to be removed. */
struct level {
    DIR *folder; /* NULL: not kept open */
    dev_t device;
    ino_t inode;
    char *name; /* of the directory below it that we went into */
};

struct removal {
    struct timer timer;
    struct stream *stream;
    DIR *folder;
    struct level *levels;
    size_t depth, capacity;
    char path[PATH_MAX];
};

static void removal_closed(struct stream *stream)
{
    struct removal *removal = stream->owner;
    timer_set(&removal->timer, 0);
    if (removal->folder)
        closedir(removal->folder);
    while (removal->depth) {
        struct level *level = &removal->levels[--removal->depth];
        if (level->folder)
            closedir(level->folder);
        free(level->name);
    }
    free(removal->levels);
    free_later(removal);
}

static int open_to_empty(int at, const char *name)
{
    int how = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
    int fd = openat(at, name, how);
    if (fd < 0 && errno == EACCES && fchmodat(at, name, 0700, 0) == 0)
        fd = openat(at, name, how);
    return fd;
}

static int remember_level(struct removal *removal, const char *name)
{
    struct stat info;
    if (removal->depth == removal->capacity) {
        size_t capacity = removal->capacity ? removal->capacity * 2 : 16;
        struct level *larger = realloc(removal->levels, capacity * sizeof *larger);
        if (!larger)
            return -1;
        removal->levels = larger;
        removal->capacity = capacity;
    }
    if (fstat(dirfd(removal->folder), &info) < 0)
        return -1;
    struct level level = {NULL, info.st_dev, info.st_ino, strdup(name)};
    if (!level.name)
        return -1;
    removal->levels[removal->depth++] = level;
    return 0;
}

static int enter(struct removal *removal, const char *name)
{
    int fd = open_to_empty(dirfd(removal->folder), name);
    DIR *folder = fd >= 0 ? fdopendir(fd) : NULL;
    if (!folder || remember_level(removal, name) < 0) {
        int error = errno;
        if (folder)
            closedir(folder);
        else if (fd >= 0)
            close(fd);
        return errno = error, -1;
    }
    if (removal->depth <= LEVELS_KEPT_OPEN)
        removal->levels[removal->depth - 1].folder = removal->folder;
    else
        closedir(removal->folder);
    removal->folder = folder;
    return 0;
}

/* The directory above this one, from its beginning. */
static DIR *go_back(struct removal *removal, const struct level *above)
{
    struct stat info;
    int fd = openat(dirfd(removal->folder), "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return NULL;
    errno = EBUSY;
    bool same = fstat(fd, &info) == 0 && info.st_dev == above->device && info.st_ino == above->inode;
    DIR *folder = same ? fdopendir(fd) : NULL;
    if (!folder) {
        int error = errno;
        close(fd);
        errno = error;
    }
    return folder;
}

static int leave(struct removal *removal)
{
    struct level *above = &removal->levels[removal->depth - 1];
    DIR *folder = above->folder ? above->folder : go_back(removal, above);
    if (!folder)
        return -1;
    closedir(removal->folder);
    removal->folder = folder;
    int result = unlinkat(dirfd(folder), above->name, AT_REMOVEDIR);
    int error = errno;
    free(above->name);
    removal->depth--;
    return errno = error, result < 0 && error != ENOENT ? -1 : 0;
}

/* As unlinkat(2); a directory of ours that is not writable does not stop us. */
static int unlink_entry(int folder, const char *name)
{
    int result = unlinkat(folder, name, 0);
    if (result < 0 && errno == EACCES)
        result = fchmod(folder, 0700) < 0 ? (errno = EACCES, -1) : unlinkat(folder, name, 0);
    return result;
}

/* 1: more to do; 0: all is gone; -1: errno. */
static int remove_one(struct removal *removal)
{
    errno = 0;
    struct dirent *entry = readdir(removal->folder);
    if (!entry) {
        if (errno)
            return -1;
        if (!removal->depth)
            return rmdir(removal->path) < 0 && errno != ENOENT ? -1 : 0;
        return leave(removal) < 0 ? -1 : 1;
    }
    if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
        return 1;
    if (unlink_entry(dirfd(removal->folder), entry->d_name) == 0 || errno == ENOENT)
        return 1;
    if (errno != EISDIR && errno != EPERM)
        return -1;
    int error = errno;
    if (enter(removal, entry->d_name) == 0)
        return 1;
    if (errno == ENOTDIR)
        errno = error;
    return -1;
}

static void removal_fire(struct timer *timer)
{
    struct removal *removal = (struct removal *)((char *)timer - offsetof(struct removal, timer));
    int result = 1;
    for (int i = 0; i < REMOVALS_PER_TURN && result > 0; i++)
        result = remove_one(removal);
    if (result > 0)
        timer_set(timer, now_ns());
    else if (result == 0)
        stream_finish(removal->stream, NULL);
    else
        stream_fail(removal->stream, errno, removal->path);
}

static void remove_tree(struct stream *stream, const char *path)
{
    static const struct stream_ops ops = {.closed = removal_closed};
    struct removal *removal = calloc(1, sizeof *removal);
    int fd = removal ? open_to_empty(AT_FDCWD, path) : -1;
    if (fd < 0 || !(removal->folder = fdopendir(fd))) {
        int error = errno;
        if (fd >= 0)
            close(fd);
        free(removal);
        stream_fail(stream, error, path);
        return;
    }
    removal->stream = stream;
    removal->timer.fire = removal_fire;
    strcpy(removal->path, path);
    stream_serve(stream, &ops, removal);
    timer_set(&removal->timer, now_ns());
}

void file_remove(struct stream *stream, struct fields fields)
{
    char path[PATH_MAX];
    uint64_t flags = fields_number_or(fields, TAG_FLAGS, 0);
    struct stat info;
    if (fields_path(fields, TAG_PATH, path) < 0) {
        stream_fail(stream, errno, "PATH");
    } else if (lstat(path, &info) < 0) {
        if (errno == ENOENT && flags & 2)
            stream_finish(stream, NULL);
        else
            stream_fail(stream, errno, path);
    } else if (!S_ISDIR(info.st_mode)) {
        unlink(path) < 0 ? stream_fail(stream, errno, path) : stream_finish(stream, NULL);
    } else if (flags & 1) {
        remove_tree(stream, path);
    } else {
        rmdir(path) < 0 ? stream_fail(stream, errno, path) : stream_finish(stream, NULL);
    }
}
