/* Connections: reading and writing frames. stream.c implements the streams in them, listener.c accepts connections.
 *
 * Output is produced on demand. A stream that has output is put into its connection's ready queue; while the output buffer
 * has room, the streams in the queue take turns to add one frame each. So no stream can delay others with a flood, and nothing
 * is buffered for a host that does not read. DATA is passed on in pieces as it arrives, other frames when they are complete.
 *
 * All data from the host is validated; an error closes that connection and nothing else.
 */
#define _GNU_SOURCE
#include "connection.h"

#include <errno.h>
#include <malloc.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    PUMPS_PER_TURN = 16, /* afterwards other connections get their turn, even if this host reads fast */
    SMALL = 64 * 1024,   /* buffers above this are given back when a connection is idle */
    IN_SIZE = HEADER_SIZE + MAX_PAYLOAD,
    OUT_ENOUGH = 256 * 1024,      /* stop pumping above this */
    OUT_TOO_MUCH = 4 * 1024 * 1024, /* stop reading above this: the host sends requests without reading answers */
};

static unsigned connection_count;
static struct connection *dirty_first;

unsigned connections_count(void) { return connection_count; }

/* --- output ------------------------------------------------------------------------------------------------------- */

uint8_t *out_room(struct connection *connection, size_t length)
{
    if (connection->out_start == connection->out_end)
        connection->out_start = connection->out_end = 0;
    if (connection->out_capacity - connection->out_end < length && connection->out_start) {
        memmove(connection->out_bytes, connection->out_bytes + connection->out_start, connection->out_end - connection->out_start);
        connection->out_end -= connection->out_start;
        connection->out_start = 0;
    }
    if (connection->out_capacity - connection->out_end < length) {
        size_t capacity = connection->out_capacity ? connection->out_capacity : 4096;
        while (capacity - connection->out_end < length)
            capacity *= 2;
        uint8_t *larger = realloc(connection->out_bytes, capacity);
        if (!larger) {
            connection->broken = true;
            return NULL;
        }
        connection->out_bytes = larger;
        connection->out_capacity = capacity;
    }
    return connection->out_bytes + connection->out_end;
}

void write_header(uint8_t *at, size_t length, uint32_t number, unsigned type, unsigned channel)
{
    put_u32(at, (uint32_t)length);
    put_u32(at + 4, number);
    at[8] = (uint8_t)type;
    at[9] = (uint8_t)channel;
    put_u16(at + 10, 0);
}

void send_frame(struct connection *connection, uint32_t number, unsigned type, const void *payload, size_t length)
{
    uint8_t *at = out_room(connection, HEADER_SIZE + length);
    if (!at)
        return;
    write_header(at, length, number, type, 0);
    if (length)
        memcpy(at + HEADER_SIZE, payload, length);
    connection->out_end += HEADER_SIZE + length;
}

static void pump(struct connection *connection)
{
    while (connection->ready_first && connection->out_end - connection->out_start < OUT_ENOUGH && !connection->broken) {
        struct stream *stream = connection->ready_first;
        connection->ready_first = stream->ready_next;
        if (!connection->ready_first)
            connection->ready_last = &connection->ready_first;
        stream->is_ready = false;
        if (stream->ops->pump && stream->ops->pump(stream))
            stream_wake(stream);
    }
}

static void destroy(struct connection *connection);

void mark_dirty(struct connection *connection)
{
    if (connection->dirty)
        return;
    connection->dirty = true;
    connection->dirty_next = dirty_first;
    dirty_first = connection;
}

/* Free large buffers when the connection is idle, so that an idle agent uses little memory. */
static void trim(struct timer *timer)
{
    struct connection *connection = (struct connection *)((char *)timer - offsetof(struct connection, trim));
    if (connection->out_start == connection->out_end && !connection->ready_first) {
        free(connection->out_bytes);
        connection->out_bytes = NULL;
        connection->out_start = connection->out_end = connection->out_capacity = 0;
#ifdef __GLIBC__
        malloc_trim(0);
#endif
    }
    if (!connection->in_end) /* otherwise it holds part of a frame */
        madvise(connection->in_bytes, IN_SIZE, MADV_DONTNEED);
}

static void flush(struct connection *connection)
{
    for (int turns = 0; turns < PUMPS_PER_TURN; turns++) {
        if (!connection->refused)
            pump(connection);
        size_t length = connection->out_end - connection->out_start;
        if (!length || connection->broken)
            break;
        ssize_t written = write(connection->out.fd, connection->out_bytes + connection->out_start, length);
        if (written < 0) {
            if (errno == EINTR)
                continue;
            if (errno != EAGAIN)
                connection->broken = true;
            break;
        }
        connection->out_start += (size_t)written;
    }
    if (connection->broken) {
        destroy(connection);
        return;
    }
    size_t left = connection->out_end - connection->out_start;
    if (!left && connection->refused) {
        destroy(connection);
        return;
    }
    if (connection->out_capacity > SMALL && !connection->trim.due_ns)
        timer_set(&connection->trim, now_ns() + 1000 * MS);
    uint32_t in = left > OUT_TOO_MUCH || connection->refused ? 0 : EPOLLIN;
    uint32_t out = left || (connection->ready_first && !connection->refused) ? EPOLLOUT : 0;
    if (connection->in.fd == connection->out.fd) {
        source_watch(&connection->in, in | out);
    } else {
        source_watch(&connection->in, in);
        source_watch(&connection->out, out);
    }
}

/* --- input ---------------------------------------------------------------------------------------------------------- */

void refuse(struct connection *connection, const char *why)
{
    struct builder fields;
    fields.length = 0;
    add_number(&fields, TAG_ERRNO, EPROTO);
    add_bytes(&fields, TAG_MESSAGE, why, strlen(why));
    send_frame(connection, 0, FRAME_ERROR, fields.bytes, fields.length);
    connection->refused = true;
}

static void receive(struct connection *connection, uint32_t number, unsigned type, const uint8_t *payload, size_t length)
{
    if (type == FRAME_OPEN) {
        open_stream(connection, number, payload, length);
        return;
    }
    struct stream *stream = find_stream(connection, number);
    if (!stream) {
        if (!number || number > connection->last_number)
            refuse(connection, "no such stream");
        return;
    }
    switch (type) {
    case FRAME_END:
        if (!stream->ended_by_host) {
            stream->ended_by_host = true;
            if (stream->ops->end)
                stream->ops->end(stream);
        }
        break;
    case FRAME_CREDIT:
        if (length != 4) {
            refuse(connection, "bad CREDIT");
        } else {
            stream->credit += get_u32(payload);
            if (stream->ops->pump)
                stream_wake(stream);
        }
        break;
    case FRAME_CONTROL:
        if (length < 2)
            refuse(connection, "bad CONTROL");
        else if (!fields_valid((struct fields){payload + 2, length - 2}))
            stream_fail(stream, EINVAL, "malformed fields");
        else if (stream->ops->control)
            stream->ops->control(stream, get_u16(payload), (struct fields){payload + 2, length - 2});
        break;
    default:
        stream_fail(stream, ECANCELED, NULL);
    }
}

static bool receive_header(struct connection *connection)
{
    const uint8_t *at = connection->in_bytes + connection->in_start;
    uint32_t length = get_u32(at), number = get_u32(at + 4);
    unsigned type = at[8];
    if (length > MAX_PAYLOAD || at[9] || get_u16(at + 10) || type < FRAME_OPEN || type > FRAME_CLOSE) {
        refuse(connection, "malformed frame");
        return false;
    }
    if (type != FRAME_DATA) {
        if (connection->in_end - connection->in_start < HEADER_SIZE + length)
            return false;
        connection->in_start += HEADER_SIZE + length;
        receive(connection, number, type, at + HEADER_SIZE, length);
        return !connection->refused;
    }
    struct stream *stream = find_stream(connection, number);
    if (!number || number > connection->last_number) {
        refuse(connection, "no such stream");
        return false;
    }
    if (stream) {
        if (length > stream->granted || stream->ended_by_host) {
            refuse(connection, "DATA without credit");
            return false;
        }
        stream->granted -= length;
    }
    connection->in_start += HEADER_SIZE;
    connection->data_left = length;
    connection->data_number = number;
    return true;
}

static void parse(struct connection *connection)
{
    for (;;) {
        size_t available = connection->in_end - connection->in_start;
        if (connection->data_left) {
            size_t length = available < connection->data_left ? available : connection->data_left;
            if (!length)
                break;
            struct stream *stream = find_stream(connection, connection->data_number);
            connection->data_left -= (uint32_t)length;
            connection->in_start += length;
            if (stream && stream->ops->data)
                stream->ops->data(stream, connection->in_bytes + connection->in_start - length, length);
            else if (stream)
                stream_fail(stream, EINVAL, "this operation takes no input");
        } else if (available < HEADER_SIZE || !receive_header(connection)) {
            break;
        }
    }
    size_t left = connection->in_end - connection->in_start;
    memmove(connection->in_bytes, connection->in_bytes + connection->in_start, left);
    connection->in_start = 0;
    connection->in_end = left;
}

static void connection_ready(struct source *source, uint32_t events)
{
    struct connection *connection = (struct connection *)((char *)source - offsetof(struct connection, in));
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR) && !connection->refused) {
        ssize_t length = read(source->fd, connection->in_bytes + connection->in_end, IN_SIZE - connection->in_end);
        if (length > 0) {
            connection->in_end += (size_t)length;
            if (connection->in_end > SMALL && !connection->trim.due_ns)
                timer_set(&connection->trim, now_ns() + 1000 * MS);
            parse(connection);
        } else if (length == 0 || (errno != EAGAIN && errno != EINTR)) {
            connection->ended = length == 0;
            connection->broken = true;
        }
    }
    mark_dirty(connection);
}

static void out_ready(struct source *source, uint32_t events)
{
    struct connection *connection = (struct connection *)((char *)source - offsetof(struct connection, out));
    (void)events;
    mark_dirty(connection);
}

void connections_flush(void)
{
    while (dirty_first) {
        struct connection *connection = dirty_first;
        dirty_first = connection->dirty_next;
        if (connection->in.fd >= 0)
            flush(connection);
        connection->dirty = false;
    }
}

static void close_descriptors(struct connection *connection)
{
    struct source *in = &connection->in, *out = &connection->out;
    if (connection->lasting) {
        int fds[2] = {in->fd, out->fd};
        source_watch(in, 0);
        source_watch(out, 0);
        in->fd = out->fd = -1;
        look_later(fds[0], fds[1], connection->ended);
    } else {
        if (out->fd != in->fd) {
            shutdown(in->fd, SHUT_RDWR); /* the process that started the agent may have it open, too */
            source_close(out);
        }
        source_close(in);
        out->fd = -1;
    }
}

static void destroy(struct connection *connection)
{
    if (connection->in.fd < 0)
        return;
    close_descriptors(connection);
    for (unsigned i = 0; i < BUCKETS; i++)
        while (connection->buckets[i])
            forget_stream(connection->buckets[i]);
    connection_count--;
    timer_set(&connection->trim, 0);
    munmap(connection->in_bytes, IN_SIZE);
    free(connection->out_bytes);
    free_later(connection);
    accept_more();
}

int connection_open(int in, int out, bool lasting)
{
    struct connection *connection = calloc(1, sizeof *connection);
    void *in_bytes = mmap(NULL, IN_SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (connection)
        connection->in = (struct source){.fd = in, .ready = connection_ready};
    if (!connection || in_bytes == MAP_FAILED || source_watch(&connection->in, EPOLLIN) < 0) {
        if (in_bytes != MAP_FAILED)
            munmap(in_bytes, IN_SIZE);
        free(connection);
        return -1;
    }
    connection->out = (struct source){.fd = out, .ready = out_ready};
    connection->in_bytes = in_bytes;
    connection->trim.fire = trim;
    connection->ready_last = &connection->ready_first;
    connection->lasting = lasting;
    connection_count++;
    return 0;
}
