/* Receiving trees: PUT_TREE receives items and creates them below a directory.
 *
 * A file is created under its own name or, if that exists, under a temporary name and then renamed over it. The directory of an
 * item is opened without following links; so nothing is written through a link, neither an existing one nor one from the same
 * tree. An incomplete file is removed. Directories stay writable until the end and then get their modes.
 *
 * With PUT_OWNED, as builds need it, items get the owners in their records, and an existing PATH keeps its mode and owner.
 */
#define _GNU_SOURCE
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MOST_FOLDER_BYTES = 128 << 20 };

enum { PUT_PARENTS = 1, PUT_OWNED = 2, PUT_REPLACE = 4 };

struct folder_mode {
    struct folder_mode *next;
    mode_t mode;
    uid_t uid;
    gid_t gid;
    bool existed;
    int64_t mtime_ns;
    char path[];
};

enum { HOLE = 4096 };

struct put {
    int root;   /* directory that paths are relative to; opened when the first item is known */
    int folder; /* the directory of the last item */
    char folder_path[PATH_MAX];
    int file;   /* the file that is being written, or -1 */
    uint64_t file_left;
    int64_t file_mtime_ns;
    uint64_t items;
    bool owned;   /* items have owners */
    bool replace; /* what is in the way of a directory is removed */
    bool made_root;
    uid_t uid;
    gid_t gid;    /* of the current item */
    bool holes;  /* the file has holes */
    bool single; /* the tree is one file or one link */
    char file_name[NAME_MAX + 1];
    char temporary[32]; /* empty if the file has its final name already */
    uint8_t record[RECORD_SIZE + 2 * PATH_MAX];
    size_t filled;
    struct folder_mode *folders;
    size_t folder_bytes;
    char path[PATH_MAX];
};

static struct timespec time_of(int64_t ns)
{
    struct timespec time = {.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
    if (time.tv_nsec < 0) {
        time.tv_nsec += 1000000000;
        time.tv_sec--;
    }
    return time;
}

static void set_time(int at, const char *name, int64_t mtime_ns)
{
    struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, time_of(mtime_ns)};
    utimensat(at, name, times, AT_SYMLINK_NOFOLLOW); /* ignore errors, because some file systems do not support this */
}

static void put_closed(struct stream *stream)
{
    struct put *put = stream->owner;
    if (put->file >= 0) {
        close(put->file);
        unlinkat(put->folder, put->temporary[0] ? put->temporary : put->file_name, 0);
    }
    while (put->folders) {
        struct folder_mode *next = put->folders->next;
        free(put->folders);
        put->folders = next;
    }
    if (put->folder >= 0)
        close(put->folder);
    if (put->root >= 0)
        close(put->root);
    free(put);
}

static bool path_is_plain(const char *path)
{
    if (*path == '/')
        return false;
    for (const char *part = path; *part;) {
        size_t length = strcspn(part, "/");
        if (!length || (length == 1 && part[0] == '.') || (length == 2 && part[0] == '.' && part[1] == '.'))
            return false;
        part += length;
        if (*part == '/' && !*++part)
            return false;
    }
    return true;
}

/* Open the directory of a path. Returns the last component of the path, or NULL with errno. */
static const char *go_to(struct put *put, const char *path)
{
    const char *slash = strrchr(path, '/');
    size_t length = slash ? (size_t)(slash - path) : 0;
    const char *name = slash ? slash + 1 : path;
    if (strlen(name) > NAME_MAX)
        return errno = ENAMETOOLONG, NULL;
    if (put->folder >= 0 && strncmp(put->folder_path, path, length) == 0 && !put->folder_path[length])
        return name; /* already open: entries of one directory usually arrive in sequence */
    int folder = open_folder(put->root, path, length);
    if (folder < 0)
        return NULL;
    if (put->folder >= 0)
        close(put->folder);
    put->folder = folder;
    memcpy(put->folder_path, path, length);
    put->folder_path[length] = 0;
    return name;
}

/* Remove a file or link that is in the way of a directory, and make the directory. */
static int replace_by_folder(struct put *put, const char *name, mode_t mode)
{
    if (!put->replace)
        return errno = ENOTDIR, -1;
    return unlinkat(put->folder, name, 0) < 0 ? -1 : mkdirat(put->folder, name, mode);
}

static int put_folder(struct put *put, const char *name, const char *path, mode_t mode, int64_t mtime_ns)
{
    struct stat info;
    bool existed = false, is_root = strcmp(path, ".") == 0;
    if (put->owned && is_root && !put->made_root)
        return 0; /* an existing directory that a tree is copied into stays as it is */
    if (mkdirat(put->folder, name, 0700 | mode) < 0) {
        if (errno != EEXIST || fstatat(put->folder, name, &info, AT_SYMLINK_NOFOLLOW) < 0)
            return -1;
        if (!S_ISDIR(info.st_mode) && replace_by_folder(put, name, 0700 | mode) < 0)
            return -1;
        if (!S_ISDIR(info.st_mode))
            info.st_mode = S_IFDIR | 0700;
        if ((info.st_mode & 0700) != 0700 && fchmodat(put->folder, name, info.st_mode | 0700, 0) < 0 && errno != EPERM)
            return -1; /* EPERM: it belongs to another user, but may be writable nevertheless */
        existed = !(is_root && put->made_root);
    }
    size_t size = sizeof(struct folder_mode) + strlen(path) + 1;
    if ((put->folder_bytes += size) > MOST_FOLDER_BYTES)
        return errno = E2BIG, -1;
    struct folder_mode *folder = malloc(size);
    if (!folder)
        return -1;
    folder->mode = mode;
    folder->uid = put->uid;
    folder->gid = put->gid;
    folder->existed = existed;
    folder->mtime_ns = mtime_ns;
    strcpy(folder->path, path);
    folder->next = put->folders; /* the list starts with the deepest, the order needed at the end */
    put->folders = folder;
    return 0;
}

static int put_link(struct put *put, const char *name, const char *target, int64_t mtime_ns)
{
    int result = symlinkat(target, put->folder, name);
    if (result < 0 && errno == EEXIST && (result = unlinkat(put->folder, name, 0)) == 0)
        result = symlinkat(target, put->folder, name);
    if (result == 0 && put->owned)
        result = fchownat(put->folder, name, put->uid, put->gid, AT_SYMLINK_NOFOLLOW);
    if (result == 0)
        set_time(put->folder, name, mtime_ns);
    return result;
}

/* Give a file of this tree that was created before one more name. */
static int put_hard_link(struct put *put, const char *name, const char *target)
{
    const char *slash = strrchr(target, '/');
    if (!put->owned || !*target || !path_is_plain(target))
        return errno = EINVAL, -1;
    int folder = open_folder(put->root, target, slash ? (size_t)(slash - target) : 0);
    if (folder < 0)
        return -1;
    const char *first = slash ? slash + 1 : target;
    int result = linkat(folder, first, put->folder, name, 0);
    if (result < 0 && errno == EEXIST && (result = unlinkat(put->folder, name, 0)) == 0)
        result = linkat(folder, first, put->folder, name, 0);
    int error = errno;
    close(folder);
    errno = error;
    return result;
}

static int put_file(struct put *put, const char *name, mode_t mode, uint64_t size, int64_t mtime_ns)
{
    int how = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
    put->temporary[0] = 0;
    put->file = openat(put->folder, name, how, 0600);
    if (put->file < 0 && errno == EEXIST) {
        struct stat info;
        uint64_t random;
        if (fstatat(put->folder, name, &info, AT_SYMLINK_NOFOLLOW) == 0 && S_ISDIR(info.st_mode))
            return errno = EISDIR, -1;
        if (getrandom(&random, sizeof random, 0) != sizeof random)
            return -1;
        snprintf(put->temporary, sizeof put->temporary, ".atoll-%016llx", (unsigned long long)random);
        put->file = openat(put->folder, put->temporary, how, 0600);
    }
    if (put->file < 0)
        return -1;
    strcpy(put->file_name, name);
    put->file_left = size;
    put->file_mtime_ns = mtime_ns;
    if (put->owned && fchown(put->file, put->uid, put->gid) < 0)
        return -1;
    return fchmod(put->file, mode);
}

static int finish_file(struct put *put)
{
    struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, time_of(put->file_mtime_ns)};
    if (put->holes) { /* the file may end with a hole */
        off_t size = lseek(put->file, 0, SEEK_CUR);
        put->holes = false;
        if (size < 0 || ftruncate(put->file, size) < 0)
            return -1;
    }
    futimens(put->file, times);
    if (put->temporary[0] && renameat(put->folder, put->temporary, put->folder, put->file_name) < 0)
        return -1;
    int result = close(put->file);
    put->file = -1;
    return result;
}

/* Open the root of the tree: PATH itself for a directory, the parent of PATH for anything else. */
static int open_root(struct put *put, unsigned kind)
{
    if (kind == 'd') {
        put->made_root = mkdir(put->path, 0700) == 0;
        if (!put->made_root && errno != EEXIST)
            return -1;
        put->root = open(put->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    } else {
        char *slash = strrchr(put->path, '/');
        *slash = 0;
        put->root = open(put->path[0] ? put->path : "/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        *slash = '/';
    }
    return put->root < 0 ? -1 : 0;
}

static int put_item(struct put *put)
{
    const uint8_t *at = put->record;
    size_t path_length = get_u16(at + 2), target_length = get_u16(at + 4);
    char path[PATH_MAX], target[PATH_MAX];
    memcpy(path, at + RECORD_SIZE, path_length);
    path[path_length] = 0;
    memcpy(target, at + RECORD_SIZE + path_length, target_length);
    target[target_length] = 0;
    mode_t mode = get_u32(at + 8) & 07777;
    put->uid = get_u32(at + 12);
    put->gid = get_u32(at + 16);
    int64_t mtime_ns = (int64_t)get_u64(at + 28);
    if (strlen(path) != path_length || strlen(target) != target_length || !path_is_plain(path))
        return errno = EINVAL, -1;
    if (!put->items++) {
        if (path_length)
            return errno = EINVAL, -1;
        if (open_root(put, at[0]) < 0)
            return -1;
        strcpy(path, at[0] == 'd' ? "." : strrchr(put->path, '/') + 1);
        put->single = at[0] != 'd';
    } else if (!path_length || put->single) {
        return errno = EINVAL, -1; /* a tree that is a single file has no other items */
    }
    const char *name = go_to(put, path);
    if (!name)
        return -1;
    switch (at[0]) {
    case 'd': return put_folder(put, name, path, mode, mtime_ns);
    case 'l': return put_link(put, name, target, mtime_ns);
    case 'h': return put_hard_link(put, name, target);
    case 'f': return put_file(put, name, mode, get_u64(at + 20), mtime_ns);
    default: return errno = EINVAL, -1;
    }
}

static size_t record_length(const struct put *put)
{
    if (put->filled < RECORD_SIZE)
        return RECORD_SIZE;
    return RECORD_SIZE + get_u16(put->record + 2) + get_u16(put->record + 4);
}

static bool is_zero(const uint8_t *bytes, size_t length)
{
    return !length || (!bytes[0] && !memcmp(bytes, bytes + 1, length - 1));
}

static bool is_zero_block(const uint8_t *bytes, size_t length)
{
    return length >= HOLE && is_zero(bytes, HOLE);
}

/* Write content to the file. Blocks of zeros become holes: the file is new, so unwritten parts read as zeros and use no space. */
static int take_content(struct put *put, const uint8_t **bytes, size_t *length)
{
    size_t part = *length < put->file_left ? *length : (size_t)put->file_left;
    for (size_t done = 0; done < part;) {
        size_t end = done;
        while (is_zero_block(*bytes + end, part - end))
            end += HOLE;
        if (end > done) {
            if (part - end < HOLE && is_zero(*bytes + end, part - end))
                end = part; /* the zeros may continue in the next piece */
            put->holes = true;
            if (lseek(put->file, (off_t)(end - done), SEEK_CUR) < 0)
                return -1;
            done = end;
            continue;
        }
        while (end < part && !is_zero_block(*bytes + end, part - end))
            end += part - end < HOLE ? part - end : HOLE;
        ssize_t written = write(put->file, *bytes + done, end - done);
        if (written < 0 && errno == EINTR)
            continue;
        if (written <= 0)
            return -1;
        done += (size_t)written;
    }
    *bytes += part;
    *length -= part;
    put->file_left -= part;
    return put->file_left ? 0 : finish_file(put);
}

static int take_record(struct put *put, const uint8_t **bytes, size_t *length)
{
    size_t want = record_length(put);
    if (want > RECORD_SIZE && (get_u16(put->record + 2) >= PATH_MAX || get_u16(put->record + 4) >= PATH_MAX))
        return errno = ENAMETOOLONG, -1;
    size_t part = want - put->filled < *length ? want - put->filled : *length;
    memcpy(put->record + put->filled, *bytes, part);
    put->filled += part;
    *bytes += part;
    *length -= part;
    if (put->filled < record_length(put))
        return 0;
    put->filled = 0;
    if (put_item(put) < 0)
        return -1;
    return put->file >= 0 && !put->file_left ? finish_file(put) : 0;
}

static void describe_failure(struct stream *stream, struct put *put)
{
    char what[PATH_MAX + 16];
    int error = errno;
    int path_length = (int)get_u16(put->record + 2); /* of the current item, whose record is kept until the next one */
    if (path_length > 0 && path_length < PATH_MAX)
        snprintf(what, sizeof what, "%.2000s/%.*s", put->path, path_length > 2000 ? 2000 : path_length, put->record + RECORD_SIZE);
    else
        snprintf(what, sizeof what, "%.2000s", put->path);
    stream_fail(stream, error, what);
}

static void put_data(struct stream *stream, const uint8_t *bytes, size_t length)
{
    struct put *put = stream->owner;
    size_t all = length;
    while (length) {
        int result = put->file >= 0 ? take_content(put, &bytes, &length) : take_record(put, &bytes, &length);
        if (result < 0) {
            describe_failure(stream, put);
            return;
        }
    }
    stream_consumed(stream, all);
}

static int finish_folder(struct put *put, const struct folder_mode *folder)
{
    const char *name = go_to(put, folder->path);
    int fd = name ? openat(put->folder, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC) : -1;
    if (fd < 0)
        return name && errno == EACCES && folder->existed ? 0 : -1;
    struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, time_of(folder->mtime_ns)};
    futimens(fd, times);
    int result = put->owned ? fchown(fd, folder->uid, folder->gid) : 0;
    if (result == 0)
        result = fchmod(fd, folder->mode);
    int error = errno;
    close(fd);
    if (result < 0 && error == EPERM && folder->existed)
        return 0; /* an existing directory of another user stays unchanged */
    return errno = error, result;
}

static void put_end(struct stream *stream)
{
    struct put *put = stream->owner;
    struct builder fields;
    if (put->file >= 0 || put->filled || !put->items) {
        stream_fail(stream, EINVAL, "the tree is incomplete");
        return;
    }
    for (struct folder_mode *folder = put->folders; folder; folder = folder->next) {
        if (finish_folder(put, folder) < 0) {
            stream_fail(stream, errno, folder->path);
            return;
        }
    }
    fields.length = 0;
    add_number(&fields, TAG_SIZE, put->items);
    stream_finish(stream, &fields);
}

/* Like make_parents, but the new directories belong to this user. */
static int make_owned_parents(char *path, uid_t uid, gid_t gid)
{
    for (char *slash = path + 1; (slash = strchr(slash, '/')); slash++) {
        *slash = 0;
        int result = mkdir(path, 0755);
        if (result == 0 && (lchown(path, uid, gid) < 0 || chmod(path, 0755) < 0)) {
            *slash = '/';
            return -1;
        }
        int error = errno;
        *slash = '/';
        if (result < 0 && error != EEXIST && error != EISDIR && error != EROFS)
            return errno = error, -1;
    }
    return 0;
}

void tree_put(struct stream *stream, struct fields fields)
{
    static const struct stream_ops ops = {.data = put_data, .end = put_end, .closed = put_closed};
    struct put *put = calloc(1, sizeof *put);
    int result = put ? fields_path(fields, TAG_PATH, put->path) : -1;
    if (result == 0) {
        put->root = put->folder = put->file = -1;
        for (size_t length = strlen(put->path); length > 1 && put->path[length - 1] == '/';)
            put->path[--length] = 0;
        uint64_t flags = fields_number_or(fields, TAG_FLAGS, 0);
        uid_t uid = (uid_t)fields_number_or(fields, TAG_UID, 0);
        gid_t gid = (gid_t)fields_number_or(fields, TAG_GID, 0);
        put->owned = flags & PUT_OWNED;
        put->replace = flags & PUT_REPLACE;
        if (flags & PUT_PARENTS)
            result = put->owned ? make_owned_parents(put->path, uid, gid) : make_parents(put->path);
    }
    if (result < 0) {
        stream_fail(stream, put ? errno : ENOMEM, put ? put->path : NULL);
        free(put);
        return;
    }
    stream_serve(stream, &ops, put);
    stream_grant(stream, 3 * WINDOW);
}
