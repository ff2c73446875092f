/* Connections: frames in and out, streams with credit.
 *
 * Output is made on demand. A stream with something to say is put into its connection's ready queue; while the output buffer
 * has room, the streams in the queue take turns to add one frame each. So no stream can flood another, and nothing is
 * buffered for a host that does not read. Input of DATA is handed on piece by piece as it arrives, other frames when they are whole.
 *
 * What the host sends is checked as if it were hostile: a mistake closes that connection and nothing else.
 */
#define _GNU_SOURCE
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    BUCKETS = 64,
    PUMPS_PER_TURN = 16, /* then other connections get their turn, however fast this host reads */
    SMALL = 64 * 1024,   /* buffers above this are given back when a connection is idle */
    IN_SIZE = HEADER_SIZE + MAX_PAYLOAD,
    OUT_ENOUGH = 256 * 1024,      /* stop pumping above this */
    OUT_TOO_MUCH = 4 * 1024 * 1024, /* stop reading above this: the host asks and does not read answers */
};

struct connection {
    struct source in, out; /* the same descriptor for a socket */
    uint8_t *in_bytes;
    size_t in_start, in_end;
    uint8_t *out_bytes;
    size_t out_start, out_end, out_capacity;
    uint32_t last_number;
    uint32_t data_left; /* of a DATA frame whose header was read */
    uint32_t data_number;
    unsigned stream_count;
    struct stream *buckets[BUCKETS];
    struct stream *ready_first, **ready_last;
    struct connection *dirty_next; /* has output to flush at the end of this turn */
    struct timer trim;
    bool dirty, broken, refused;
    bool ended; /* by the host */
    bool lasting; /* its descriptors are used again for the next one */
};

static unsigned connection_count, stream_total;
static struct source listener = {.fd = -1};
static struct timer accept_again;
static struct connection *dirty_first;

unsigned connections_count(void) { return connection_count; }
unsigned streams_count(void) { return stream_total; }

/* --- output ------------------------------------------------------------------------------------------------------- */

static uint8_t *out_room(struct connection *connection, size_t length)
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

static void write_header(uint8_t *at, size_t length, uint32_t number, unsigned type, unsigned channel)
{
    put_u32(at, (uint32_t)length);
    put_u32(at + 4, number);
    at[8] = (uint8_t)type;
    at[9] = (uint8_t)channel;
    put_u16(at + 10, 0);
}

static void send_frame(struct connection *connection, uint32_t number, unsigned type, const void *payload, size_t length)
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

static void mark_dirty(struct connection *connection)
{
    if (connection->dirty)
        return;
    connection->dirty = true;
    connection->dirty_next = dirty_first;
    dirty_first = connection;
}

/* An idle agent is a small agent: give back what a flood made grow. */
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
    if (!connection->in_end) /* else there is half a frame in it */
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

/* --- streams ------------------------------------------------------------------------------------------------------ */

static struct stream *find_stream(struct connection *connection, uint32_t number)
{
    struct stream *stream = connection->buckets[number % BUCKETS];
    while (stream && stream->number != number)
        stream = stream->hash_next;
    return stream;
}

static void forget_stream(struct stream *stream)
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

/* --- input ---------------------------------------------------------------------------------------------------------- */

/* Say why on stream 0, send what is pending, then close. */
static void refuse(struct connection *connection, const char *why)
{
    struct builder fields;
    fields.length = 0;
    add_number(&fields, TAG_ERRNO, EPROTO);
    add_bytes(&fields, TAG_MESSAGE, why, strlen(why));
    send_frame(connection, 0, FRAME_ERROR, fields.bytes, fields.length);
    connection->refused = true;
}

static void open_stream(struct connection *connection, uint32_t number, const uint8_t *payload, size_t length)
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

static void look_later(int in, int out, bool ended);

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
            shutdown(in->fd, SHUT_RDWR); /* whoever started us may hold it open too */
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
    if (listener.fd >= 0 && !accept_again.due_ns)
        source_watch(&listener, EPOLLIN);
}

static int connection_open(int in, int out, bool lasting)
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

/* --- where connections come from -------------------------------------------------------------------------------------------- */

static void not_blocking(int fd) { fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK); }

static void accept_fire(struct timer *timer)
{
    (void)timer;
    source_watch(&listener, EPOLLIN);
}

static void accept_ready(struct source *source, uint32_t events)
{
    (void)events;
    while (connection_count < MAX_CONNECTIONS) {
        int fd = accept4(source->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0 && (errno == EAGAIN || errno == ECONNABORTED || errno == EINTR))
            return;
        if (fd < 0 || connection_open(fd, fd, false) < 0) {
            if (fd >= 0)
                close(fd);
            timer_set(&accept_again, now_ns() + 100 * MS); /* no descriptors or no memory: asking at once would only burn time */
            break;
        }
    }
    source_watch(source, 0); /* until one of them ends */
}

void connections_listen(int fd)
{
    not_blocking(fd);
    accept_again.fire = accept_fire;
    listener = (struct source){.fd = fd, .ready = accept_ready};
    if (source_watch(&listener, EPOLLIN) < 0)
        _exit(72);
}

/* A fifo without a writer is always at its end, and epoll would say so without pause: we look again from time to time. After anything
 * but an end we are somewhere in the middle of a frame, and what is left of that host's words is thrown away. */
static struct {
    struct timer timer;
    int in, out;
    bool ended;
} lasting;

static void skip_to_end(void)
{
    uint8_t ignored[16384];
    ssize_t length = 1;
    for (int i = 0; i < 64 && length > 0; i++)
        length = read(lasting.in, ignored, sizeof ignored);
    lasting.ended = length == 0;
}

static void lasting_fire(struct timer *timer)
{
    struct pollfd input = {.fd = lasting.in, .events = POLLIN};
    if (!lasting.ended)
        skip_to_end();
    if (!lasting.ended || poll(&input, 1, 0) <= 0 || !(input.revents & POLLIN) || connection_open(lasting.in, lasting.out, true) < 0)
        timer_set(timer, now_ns() + 100 * MS);
}

static void look_later(int in, int out, bool ended)
{
    lasting.in = in;
    lasting.out = out;
    lasting.ended = ended;
    lasting.timer.fire = lasting_fire;
    timer_set(&lasting.timer, now_ns() + 100 * MS);
}

void connection_over(int in, int out)
{
    struct stat info;
    bool again = fstat(in, &info) == 0 && S_ISFIFO(info.st_mode); /* a socket whose other end is closed stays so */
    not_blocking(in);
    not_blocking(out);
    if (connection_open(in, out, again) < 0)
        look_later(in, out, true);
}
