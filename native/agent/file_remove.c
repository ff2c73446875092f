/* Removing files and trees.
 *
 * A tree is removed a few entries at a time, so that other streams get their turn, and without recursion: the agent works in one
 * directory and remembers those above it. The topmost ones stay open; the others are reached through "..". If that leads to another
 * directory than expected, the tree was moved meanwhile, and the removal stops, because it could remove something else.
 */
#define _GNU_SOURCE
#include "agent.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { REMOVALS_PER_TURN = 256, LEVELS_KEPT_OPEN = 16 };

struct level {
    DIR *folder; /* NULL if not kept open */
    dev_t device;
    ino_t inode;
    char *name; /* of the subdirectory that is being removed */
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

/* Reopen the directory above the current one, to list it from its beginning. */
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

/* Like unlinkat(2), but makes the directory writable first if necessary and allowed. */
static int unlink_entry(int folder, const char *name)
{
    int result = unlinkat(folder, name, 0);
    if (result < 0 && errno == EACCES)
        result = fchmod(folder, 0700) < 0 ? (errno = EACCES, -1) : unlinkat(folder, name, 0);
    return result;
}

/* Returns 1 if there is more to do, 0 if everything is gone, -1 with errno. */
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
