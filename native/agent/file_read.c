/* Reading a file. */
#define _GNU_SOURCE
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { READ_CHUNK = 128 * 1024 };

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
