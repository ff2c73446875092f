/* Streams with flow control: neither side sends more than the credit that the other has granted. */
#define _GNU_SOURCE
#include "connection.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static unsigned stream_total;

unsigned streams_count(void) { return stream_total; }

struct stream *find_stream(struct connection *connection, uint32_t number)
{
    struct stream *stream = connection->buckets[number % BUCKETS];
    while (stream && stream->number != number)
        stream = stream->hash_next;
    return stream;
}

void forget_stream(struct stream *stream)
{
    struct connection *connection = stream->connection;
    struct stream **link = &connection->buckets[stream->number % BUCKETS];
    while (*link != stream)
        link = &(*link)->hash_next;
    *link = stream->hash_next;
    if (stream->is_ready) {
        for (link = &connection->ready_first; *link != stream; link = &(*link)->ready_next)
            continue;
        *link = stream->ready_next;
        if (!*link)
            connection->ready_last = link;
        stream->is_ready = false;
    }
    connection->stream_count--;
    stream_total--;
    if (stream->ops)
        stream->ops->closed(stream);
    stream->ops = NULL;
    stream->connection = NULL;
    free_later(stream);
}

void stream_serve(struct stream *stream, const struct stream_ops *ops, void *owner)
{
    stream->ops = ops;
    stream->owner = owner;
}

void stream_wake(struct stream *stream)
{
    struct connection *connection = stream->connection;
    if (stream->is_ready)
        return;
    stream->is_ready = true;
    stream->ready_next = NULL;
    *connection->ready_last = stream;
    connection->ready_last = &stream->ready_next;
    mark_dirty(connection);
}

uint8_t *stream_reserve(struct stream *stream, size_t most, size_t *room)
{
    if (most > MAX_PAYLOAD)
        most = MAX_PAYLOAD;
    if (most > stream->credit)
        most = (size_t)stream->credit;
    if (!most)
        return NULL;
    uint8_t *at = out_room(stream->connection, HEADER_SIZE + most);
    *room = most;
    return at ? at + HEADER_SIZE : NULL;
}

void stream_commit(struct stream *stream, unsigned channel, size_t length)
{
    struct connection *connection = stream->connection;
    if (!length)
        return;
    write_header(connection->out_bytes + connection->out_end, length, stream->number, FRAME_DATA, channel);
    connection->out_end += HEADER_SIZE + length;
    stream->credit -= length;
}

void stream_grant(struct stream *stream, uint32_t more)
{
    uint8_t bytes[4];
    put_u32(bytes, more);
    stream->granted += more;
    send_frame(stream->connection, stream->number, FRAME_CREDIT, bytes, sizeof bytes);
    mark_dirty(stream->connection);
}

void stream_consumed(struct stream *stream, size_t length)
{
    stream->consumed += length;
    if (stream->consumed < WINDOW / 4 || stream->ended_by_host)
        return;
    stream_grant(stream, (uint32_t)stream->consumed);
    stream->consumed = 0;
}

static void send_fields(struct stream *stream, unsigned type, const void *payload, size_t length)
{
    send_frame(stream->connection, stream->number, type, payload, length);
    mark_dirty(stream->connection);
}

void stream_event(struct stream *stream, unsigned kind, const struct builder *fields)
{
    uint8_t payload[2 + sizeof fields->bytes];
    put_u16(payload, kind);
    if (fields)
        memcpy(payload + 2, fields->bytes, fields->length);
    send_fields(stream, FRAME_EVENT, payload, 2 + (fields ? fields->length : 0));
}

void stream_finish(struct stream *stream, const struct builder *fields)
{
    send_fields(stream, FRAME_END, fields ? fields->bytes : NULL, fields ? fields->length : 0);
    forget_stream(stream);
}

void stream_fail(struct stream *stream, int error, const char *what)
{
    struct builder fields;
    char message[PATH_MAX + 128];
    fields.length = 0;
    snprintf(message, sizeof message, "%s%s%s", what ? what : "", what ? ": " : "", strerror(error));
    add_number(&fields, TAG_ERRNO, (uint64_t)error);
    add_bytes(&fields, TAG_MESSAGE, message, strlen(message));
    send_fields(stream, FRAME_ERROR, fields.bytes, fields.length);
    forget_stream(stream);
}

void open_stream(struct connection *connection, uint32_t number, const uint8_t *payload, size_t length)
{
    if (number <= connection->last_number || length < 2) {
        refuse(connection, "bad OPEN");
        return;
    }
    connection->last_number = number;
    if (connection->stream_count >= MAX_STREAMS) {
        refuse(connection, "too many streams");
        return;
    }
    struct stream *stream = calloc(1, sizeof *stream);
    if (!stream) {
        refuse(connection, "out of memory");
        return;
    }
    stream->connection = connection;
    stream->number = number;
    stream->credit = WINDOW;
    stream->granted = WINDOW;
    stream->hash_next = connection->buckets[number % BUCKETS];
    connection->buckets[number % BUCKETS] = stream;
    connection->stream_count++;
    stream_total++;
    struct fields fields = {payload + 2, length - 2};
    if (!fields_valid(fields))
        stream_fail(stream, EINVAL, "malformed fields");
    else
        operation_open(stream, get_u16(payload), fields);
}
