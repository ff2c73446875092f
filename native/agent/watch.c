/* Watching a directory or a tree with inotify.
 *
 * inotify watches single directories. For a tree, each one is watched. A new directory is also watched, and everything created in
 * it before that is reported. If events are lost because there are too many, that is reported, too.
 */
#define _GNU_SOURCE
#include "agent.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

enum { CREATED = 1, MODIFIED, REMOVED, MOVED_AWAY, MOVED_HERE, ATTRIBUTES, LOST };
enum { MOST_BUFFERED = 1 << 20, MOST_WATCHES = 65536, BUCKETS = 1024 };

static const uint32_t INTEREST = IN_CREATE | IN_CLOSE_WRITE | IN_MODIFY | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO | IN_ATTRIB
                                 | IN_ONLYDIR | IN_EXCL_UNLINK;

/* A watched directory. inotify numbers them and never uses a number twice. */
struct watched {
    struct watched *next;
    int number;
    char path[]; /* relative to the root, empty for the root */
};

struct watch {
    struct source source;
    struct stream *stream;
    bool recursive, lost;
    struct watched *buckets[BUCKETS];
    size_t count;
    uint8_t *bytes;
    size_t start, end, capacity;
    char root[PATH_MAX];
};

static struct watched **find_watched(struct watch *watch, int number)
{
    struct watched **link = &watch->buckets[(unsigned)number % BUCKETS];
    while (*link && (*link)->number != number)
        link = &(*link)->next;
    return link;
}

static void forget_watched(struct watch *watch, struct watched **link)
{
    struct watched *watched = *link;
    if (!watched)
        return;
    *link = watched->next;
    watch->count--;
    free(watched);
}

static void report(struct watch *watch, unsigned what, bool folder, const char *path)
{
    size_t length = strlen(path), need = 4 + length;
    if (watch->start && (watch->end + need > watch->capacity || watch->end + need > MOST_BUFFERED)) {
        memmove(watch->bytes, watch->bytes + watch->start, watch->end - watch->start);
        watch->end -= watch->start;
        watch->start = 0;
    }
    if (watch->end + need > MOST_BUFFERED) {
        watch->lost = true;
        return;
    }
    if (watch->end + need > watch->capacity) {
        size_t capacity = (watch->end + need) * 2;
        uint8_t *larger = realloc(watch->bytes, capacity);
        if (!larger) {
            watch->lost = true;
            return;
        }
        watch->bytes = larger;
        watch->capacity = capacity;
    }
    uint8_t *at = watch->bytes + watch->end;
    at[0] = (uint8_t)what;
    at[1] = folder;
    put_u16(at + 2, (unsigned)length);
    memcpy(at + 4, path, length);
    watch->end += need;
    stream_wake(watch->stream);
}

static bool join(char *path, const char *folder, const char *name)
{
    return snprintf(path, PATH_MAX, "%s%s%s", folder, *folder ? "/" : "", name) < PATH_MAX;
}

static int add_watch(struct watch *watch, const char *path)
{
    char full[PATH_MAX];
    if (snprintf(full, sizeof full, "%s/%s", watch->root, path) >= (int)sizeof full)
        return errno = ENAMETOOLONG, -1;
    if (watch->count >= MOST_WATCHES)
        return errno = ENOSPC, -1;
    int number = inotify_add_watch(watch->source.fd, full, INTEREST | (*path ? IN_DONT_FOLLOW : 0));
    if (number < 0)
        return -1;
    forget_watched(watch, find_watched(watch, number)); /* it may have been watched under another name */
    struct watched *watched = malloc(sizeof *watched + strlen(path) + 1);
    if (!watched)
        return -1;
    strcpy(watched->path, path);
    watched->number = number;
    watched->next = NULL;
    *find_watched(watch, number) = watched;
    watch->count++;
    return 0;
}

struct pending {
    struct pending *next;
    char path[];
};

static int push(struct pending **stack, const char *path)
{
    struct pending *pending = malloc(sizeof *pending + strlen(path) + 1);
    if (!pending)
        return -1;
    strcpy(pending->path, path);
    pending->next = *stack;
    *stack = pending;
    return 0;
}

/* Watch one directory, and push its subdirectories onto the stack. With `tell`, report its entries as created. */
static int add_one(struct watch *watch, const char *path, bool tell, struct pending **stack)
{
    char full[PATH_MAX], below[PATH_MAX];
    if (add_watch(watch, path) < 0)
        return errno == ENOENT || errno == ENOTDIR || errno == EACCES ? 0 : -1; /* it was removed or cannot be accessed */
    if (!watch->recursive || snprintf(full, sizeof full, "%s/%s", watch->root, path) >= (int)sizeof full)
        return 0;
    DIR *folder = opendir(full);
    int result = 0;
    for (struct dirent *entry; folder && result == 0 && (entry = readdir(folder));) {
        struct stat info;
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        if (!join(below, path, entry->d_name)) {
            watch->lost = true;
            continue;
        }
        bool is_folder = fstatat(dirfd(folder), entry->d_name, &info, AT_SYMLINK_NOFOLLOW) == 0 && S_ISDIR(info.st_mode);
        if (tell)
            report(watch, CREATED, is_folder, below);
        if (is_folder)
            result = push(stack, below);
    }
    if (folder)
        closedir(folder);
    return result;
}

/* Watch a directory and everything below it, at any depth. */
static int add_tree(struct watch *watch, const char *path, bool tell)
{
    struct pending *stack = NULL;
    int result = push(&stack, path), error = errno;
    while (stack) {
        struct pending *top = stack;
        stack = top->next;
        if (result == 0) {
            result = add_one(watch, top->path, tell, &stack);
            error = errno;
            if (result < 0 && error == ENAMETOOLONG) { /* too deep to have a path */
                watch->lost = true;
                result = 0;
            }
        }
        free(top);
    }
    return errno = error, result;
}

static void forget_tree(struct watch *watch, const char *path)
{
    size_t length = strlen(path);
    for (size_t i = 0; i < BUCKETS; i++) {
        for (struct watched *watched = watch->buckets[i]; watched; watched = watched->next) {
            const char *known = watched->path;
            if (strncmp(known, path, length) == 0 && (!known[length] || known[length] == '/'))
                inotify_rm_watch(watch->source.fd, watched->number); /* IN_IGNORED frees it */
        }
    }
}

static void handle(struct watch *watch, const struct inotify_event *event)
{
    static const struct {
        uint32_t mask;
        unsigned what;
    } kinds[] = {
        {IN_CREATE, CREATED},    {IN_MOVED_TO, MOVED_HERE},   {IN_MODIFY | IN_CLOSE_WRITE, MODIFIED},
        {IN_ATTRIB, ATTRIBUTES}, {IN_MOVED_FROM, MOVED_AWAY}, {IN_DELETE, REMOVED},
    };
    char path[PATH_MAX];
    bool folder = event->mask & IN_ISDIR;
    if (event->mask & IN_Q_OVERFLOW)
        watch->lost = true;
    struct watched **link = find_watched(watch, event->wd);
    if (!*link)
        return;
    if (event->mask & IN_IGNORED) {
        if (!(*link)->path[0])
            report(watch, REMOVED, true, ""); /* the root itself was removed: no more events can come */
        forget_watched(watch, link);
        return;
    }
    if (!event->len || !join(path, (*link)->path, event->name))
        return;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (event->mask & kinds[i].mask)
            report(watch, kinds[i].what, folder, path);
    if (folder && watch->recursive && event->mask & IN_MOVED_FROM)
        forget_tree(watch, path);
    if (folder && watch->recursive && event->mask & (IN_CREATE | IN_MOVED_TO) && add_tree(watch, path, true) < 0)
        watch->lost = true;
}

static void watch_ready(struct source *source, uint32_t events)
{
    struct watch *watch = (struct watch *)((char *)source - offsetof(struct watch, source));
    char buffer[16384] __attribute__((aligned(8)));
    (void)events;
    ssize_t length = read(source->fd, buffer, sizeof buffer);
    for (char *at = buffer; length > 0 && at < buffer + length;) {
        const struct inotify_event *event = (const struct inotify_event *)at;
        handle(watch, event);
        at += sizeof *event + event->len;
    }
    if (watch->lost)
        stream_wake(watch->stream);
}

static bool watch_pump(struct stream *stream)
{
    struct watch *watch = stream->owner;
    size_t room;
    if (watch->start == watch->end) {
        if (!watch->lost)
            return false;
        watch->lost = false;
        report(watch, LOST, false, "");
    }
    uint8_t *payload = stream_reserve(stream, watch->end - watch->start, &room);
    if (!payload)
        return false;
    memcpy(payload, watch->bytes + watch->start, room);
    stream_commit(stream, 0, room);
    watch->start += room;
    if (watch->start == watch->end) {
        free(watch->bytes); /* events come in bursts with long pauses between them, so keep no buffer */
        watch->bytes = NULL;
        watch->start = watch->end = watch->capacity = 0;
    }
    return true;
}

static void watch_closed(struct stream *stream)
{
    struct watch *watch = stream->owner;
    source_close(&watch->source);
    for (size_t i = 0; i < BUCKETS; i++)
        while (watch->buckets[i])
            forget_watched(watch, &watch->buckets[i]);
    free(watch->bytes);
    free_later(watch);
}

void watch_open(struct stream *stream, struct fields fields)
{
    static const struct stream_ops ops = {.pump = watch_pump, .closed = watch_closed};
    struct watch *watch = calloc(1, sizeof *watch);
    if (!watch) {
        stream_fail(stream, ENOMEM, NULL);
        return;
    }
    watch->stream = stream;
    watch->recursive = fields_number_or(fields, TAG_FLAGS, 0) & 1;
    watch->source = (struct source){.fd = inotify_init1(IN_CLOEXEC | IN_NONBLOCK), .ready = watch_ready};
    stream_serve(stream, &ops, watch);
    if (fields_path(fields, TAG_PATH, watch->root) < 0 || watch->source.fd < 0 || add_watch(watch, "") < 0
        || add_tree(watch, "", false) < 0 || source_watch(&watch->source, EPOLLIN) < 0) {
        char path[PATH_MAX];
        int error = errno;
        strcpy(path, watch->root);
        stream_fail(stream, error, path);
        return;
    }
    stream_event(stream, EVENT_READY, NULL);
}
