/* Sending trees: LIST, WALK and GET_TREE share one breadth-first walk, with or without the contents of files.
 *
 * The walk keeps one directory open and a queue of the paths of directories still to visit, so its memory does not depend on the
 * size of a directory, and its depth costs nothing. It never follows a link.
 */
#define _GNU_SOURCE
#include "agent.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { TREE_CHUNK = 128 * 1024, MOST_QUEUED = 64 << 20 };

struct folder {
    struct folder *next;
    size_t length;
    char path[]; /* relative to the root; empty for the root itself */
};

struct walk {
    unsigned operation;
    int root;
    DIR *open;
    struct folder *current, *first, **last;
    size_t queued;
    uint64_t records, most_records;
    int file;           /* the file whose content is being sent, or -1 */
    uint64_t file_left;
    bool file_short;    /* it was shorter than announced: zeros are sent instead */
    char file_path[PATH_MAX];
    uint8_t pending[RECORD_SIZE + 2 * PATH_MAX]; /* a record that did not fit into the last frame */
    size_t pending_start, pending_end;
    bool finished;
    char path[PATH_MAX];
};

static void put_record(struct walk *walk, unsigned kind, const struct stat *info, uint64_t size, const char *path, const char *target)
{
    size_t path_length = strlen(path), target_length = strlen(target);
    uint8_t *at = walk->pending;
    memset(at, 0, RECORD_SIZE);
    at[0] = (uint8_t)kind;
    put_u16(at + 2, (unsigned)path_length);
    put_u16(at + 4, (unsigned)target_length);
    if (info) {
        put_u32(at + 8, info->st_mode & 07777);
        put_u32(at + 12, info->st_uid);
        put_u32(at + 16, info->st_gid);
        put_u64(at + 28, (uint64_t)mtime_of(info));
    }
    put_u64(at + 20, size);
    memcpy(at + RECORD_SIZE, path, path_length);
    memcpy(at + RECORD_SIZE + path_length, target, target_length);
    walk->pending_start = 0;
    walk->pending_end = RECORD_SIZE + path_length + target_length;
    walk->records++;
}

static void put_error(struct walk *walk, int error, const char *path) { put_record(walk, '!', NULL, (uint64_t)error, path, ""); }

static int queue_folder(struct walk *walk, const char *path)
{
    size_t length = strlen(path);
    if (walk->queued + length + sizeof(struct folder) > MOST_QUEUED)
        return errno = ENOMEM, -1;
    struct folder *folder = malloc(sizeof *folder + length + 1);
    if (!folder)
        return -1;
    folder->next = NULL;
    folder->length = length;
    memcpy(folder->path, path, length + 1);
    walk->queued += length + sizeof *folder;
    *walk->last = folder;
    walk->last = &folder->next;
    return 0;
}

/* Put the record of one entry of the directory `at` into `pending`. */
static void visit(struct walk *walk, int at, const char *name, const char *path)
{
    struct stat info;
    char target[PATH_MAX] = "";
    if (fstatat(at, name, &info, AT_SYMLINK_NOFOLLOW) < 0) {
        if (errno != ENOENT) /* ENOENT: it was removed meanwhile, so it is left out */
            put_error(walk, errno, path);
        return;
    }
    unsigned kind = kind_of(info.st_mode);
    bool contents = walk->operation == OP_GET_TREE;
    if (kind == 'l') {
        ssize_t length = readlinkat(at, name, target, sizeof target - 1);
        if (length < 0) {
            put_error(walk, errno, path);
            return;
        }
        target[length] = 0;
    }
    if (kind == 'd' && walk->operation != OP_LIST && queue_folder(walk, path) < 0) {
        put_error(walk, errno, path);
        return;
    }
    if (contents && kind == 'f') {
        int fd = openat(at, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
        if (fd < 0 || fstat(fd, &info) < 0 || !S_ISREG(info.st_mode)) {
            put_error(walk, fd < 0 ? errno : EINVAL, path);
            if (fd >= 0)
                close(fd);
            return;
        }
        walk->file = fd;
        walk->file_left = (uint64_t)info.st_size;
        walk->file_short = false;
        strcpy(walk->file_path, path);
    } else if (contents && kind != 'd' && kind != 'l') {
        put_error(walk, EINVAL, path);
        return;
    }
    put_record(walk, kind, &info, (uint64_t)info.st_size, path, target);
}

static bool next_folder(struct walk *walk)
{
    if (walk->open)
        closedir(walk->open);
    walk->open = NULL;
    free(walk->current);
    walk->current = walk->first;
    if (!walk->current)
        return false;
    walk->first = walk->current->next;
    if (!walk->first)
        walk->last = &walk->first;
    walk->queued -= walk->current->length + sizeof *walk->current;
    const char *path = walk->current->path;
    int folder = open_folder(walk->root, path, walk->current->length);
    int fd = folder >= 0 ? openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    walk->open = fd >= 0 ? fdopendir(fd) : NULL;
    int error = errno;
    if (folder >= 0)
        close(folder);
    if (!walk->open) {
        if (error != ENOENT)
            put_error(walk, error, path);
        if (fd >= 0)
            close(fd);
    }
    return true;
}

/* Advance until there is a record in `pending` or nothing is left. */
static void advance(struct walk *walk)
{
    while (walk->pending_start == walk->pending_end) {
        if (walk->records >= walk->most_records) {
            walk->finished = true;
            return;
        }
        if (!walk->open) {
            if (!next_folder(walk)) {
                walk->finished = true;
                return;
            }
            continue;
        }
        errno = 0;
        struct dirent *entry = readdir(walk->open);
        if (!entry) {
            int error = errno;
            closedir(walk->open);
            walk->open = NULL;
            if (error)
                put_error(walk, error, walk->current->path);
            continue;
        }
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        char path[PATH_MAX];
        size_t length = walk->current->length, name_length = strlen(entry->d_name);
        if (length + name_length + 2 > PATH_MAX) {
            put_error(walk, ENAMETOOLONG, walk->current->path);
            continue;
        }
        memcpy(path, walk->current->path, length);
        if (length)
            path[length++] = '/';
        memcpy(path + length, entry->d_name, name_length + 1);
        visit(walk, dirfd(walk->open), entry->d_name, path);
    }
}

static size_t send_content(struct walk *walk, uint8_t *payload, size_t room)
{
    size_t want = walk->file_left < room ? (size_t)walk->file_left : room;
    ssize_t length = walk->file_short || !want ? 0 : read(walk->file, payload, want);
    if (length <= 0 && want) {
        memset(payload, 0, want);
        length = (ssize_t)want;
        walk->file_short = true;
    }
    walk->file_left -= (uint64_t)length;
    if (!walk->file_left) {
        close(walk->file);
        walk->file = -1;
        if (walk->file_short)
            put_error(walk, EIO, walk->file_path);
    }
    return (size_t)length;
}

static size_t produce(struct walk *walk, uint8_t *payload, size_t room)
{
    size_t filled = 0;
    while (filled < room) {
        size_t pending = walk->pending_end - walk->pending_start;
        if (pending) {
            if (pending > room - filled)
                pending = room - filled;
            memcpy(payload + filled, walk->pending + walk->pending_start, pending);
            walk->pending_start += pending;
            filled += pending;
        } else if (walk->file >= 0) {
            filled += send_content(walk, payload + filled, room - filled);
        } else {
            advance(walk);
            if (walk->finished)
                break;
        }
    }
    return filled;
}

static bool walk_pump(struct stream *stream)
{
    struct walk *walk = stream->owner;
    size_t room;
    if (walk->finished) {
        struct builder fields;
        fields.length = 0;
        add_number(&fields, TAG_SIZE, walk->records);
        stream_finish(stream, &fields);
        return false;
    }
    uint8_t *payload = stream_reserve(stream, TREE_CHUNK, &room);
    if (!payload)
        return false;
    stream_commit(stream, 0, produce(walk, payload, room));
    return true;
}

static void walk_closed(struct stream *stream)
{
    struct walk *walk = stream->owner;
    if (walk->open)
        closedir(walk->open);
    if (walk->file >= 0)
        close(walk->file);
    if (walk->root >= 0)
        close(walk->root);
    free(walk->current);
    while (walk->first) {
        struct folder *next = walk->first->next;
        free(walk->first);
        walk->first = next;
    }
    free(walk);
}

/* Start at a path that is not a directory: the tree consists of one item with an empty path. */
static int begin_at_leaf(struct walk *walk)
{
    if (walk->operation != OP_GET_TREE)
        return errno = ENOTDIR, -1;
    char resolved[PATH_MAX];
    if (!realpath(walk->path, resolved))
        return -1;
    visit(walk, AT_FDCWD, resolved, "");
    return 0;
}

void tree_walk(struct stream *stream, unsigned operation, struct fields fields)
{
    static const struct stream_ops ops = {.pump = walk_pump, .closed = walk_closed};
    struct walk *walk = calloc(1, sizeof *walk);
    if (!walk || fields_path(fields, TAG_PATH, walk->path) < 0) {
        int error = walk ? errno : ENOMEM;
        free(walk);
        stream_fail(stream, error, "PATH");
        return;
    }
    walk->operation = operation;
    walk->file = -1;
    walk->last = &walk->first;
    walk->most_records = fields_number_or(fields, TAG_LENGTH, UINT64_MAX);
    walk->root = open(walk->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int result = walk->root >= 0 ? queue_folder(walk, "") : errno == ENOTDIR ? begin_at_leaf(walk) : -1;
    if (result == 0 && walk->root >= 0 && operation == OP_GET_TREE) {
        struct stat info;
        result = fstat(walk->root, &info);
        if (result == 0)
            put_record(walk, 'd', &info, 0, "", "");
    }
    int error = errno;
    stream_serve(stream, &ops, walk);
    if (result < 0)
        stream_fail(stream, error, walk->path);
    else
        stream_wake(stream);
}
