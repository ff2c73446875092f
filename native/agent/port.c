/* Ports: a stream connected to a TCP port on the sandbox's loopback or to a Unix socket in it. */
#define _GNU_SOURCE
#include "agent.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { PORT_CHUNK = 64 * 1024 };

struct port {
    struct source source;
    struct stream *stream;
    uint16_t number; /* 0: a Unix socket */
    bool tried_v6, connected, peer_ended, host_ended, shut;
    bool silent; /* the last read from the peer found no data; otherwise the pump reads again */
    uint8_t *bytes; /* from the host, not yet accepted by the peer; bounded by credit */
    size_t start, end, capacity;
};

static void port_closed(struct stream *stream)
{
    struct port *port = stream->owner;
    source_close(&port->source);
    free(port->bytes);
    free_later(port);
}

/* Watch only for events that can be handled now. */
static void rearm(struct port *port)
{
    uint32_t events = port->start < port->end || !port->connected ? EPOLLOUT : 0;
    if (port->connected && !port->peer_ended && port->silent)
        events |= EPOLLIN;
    source_watch(&port->source, events);
}

static bool finish_if_done(struct port *port)
{
    if (port->host_ended && port->start == port->end && port->connected && !port->shut) {
        shutdown(port->source.fd, SHUT_WR);
        port->shut = true;
    }
    if (!port->peer_ended || !port->shut)
        return false;
    stream_finish(port->stream, NULL);
    return true;
}

static int begin_connect(struct port *port, const struct sockaddr *address, socklen_t length)
{
    int fd = socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -1;
    if (connect(fd, address, length) < 0 && errno != EINPROGRESS) {
        int error = errno;
        close(fd);
        return errno = error == EAGAIN ? ECONNREFUSED : error, -1;
    }
    if (port->number) {
        int yes = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    }
    port->source.fd = fd;
    rearm(port);
    return 0;
}

static int connect_v4(struct port *port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port->number), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    return begin_connect(port, (struct sockaddr *)&address, sizeof address);
}

static int connect_v6(struct port *port)
{
    struct sockaddr_in6 address = {.sin6_family = AF_INET6, .sin6_port = htons(port->number), .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    port->tried_v6 = true;
    return begin_connect(port, (struct sockaddr *)&address, sizeof address);
}

static int connect_path(struct port *port, const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path)
        return errno = ENAMETOOLONG, -1;
    strcpy(address.sun_path, path);
    return begin_connect(port, (struct sockaddr *)&address, sizeof address);
}

static void send_to_peer(struct port *port)
{
    while (port->start < port->end) {
        ssize_t length = send(port->source.fd, port->bytes + port->start, port->end - port->start, MSG_NOSIGNAL);
        if (length < 0 && errno == EINTR)
            continue;
        if (length < 0 && errno == EAGAIN)
            return;
        if (length < 0) { /* the peer accepts no more data: discard it; reading will report the peer's end */
            length = (ssize_t)(port->end - port->start);
        }
        port->start += (size_t)length;
        stream_consumed(port->stream, (size_t)length);
    }
    port->start = port->end = 0;
}

/* Send one frame from the peer. The connection calls this when it has room; until then the peer waits. */
static bool port_pump(struct stream *stream)
{
    struct port *port = stream->owner;
    size_t room;
    if (!port->connected || port->peer_ended)
        return false;
    uint8_t *payload = stream_reserve(stream, PORT_CHUNK, &room);
    if (!payload)
        return false; /* no credit: new credit wakes us */
    ssize_t length = recv(port->source.fd, payload, room, 0);
    if (length > 0) {
        stream_commit(stream, 0, (size_t)length);
        return true;
    }
    port->silent = length < 0 && (errno == EAGAIN || errno == EINTR);
    if (!port->silent) {
        port->peer_ended = true;
        stream_event(stream, EVENT_EOF, NULL);
    }
    if (!finish_if_done(port))
        rearm(port);
    return false;
}

static void port_ready(struct source *source, uint32_t events)
{
    struct port *port = (struct port *)((char *)source - offsetof(struct port, source));
    if (!port->connected) {
        int error = 0;
        socklen_t length = sizeof error;
        getsockopt(source->fd, SOL_SOCKET, SO_ERROR, &error, &length);
        if (error) {
            source_close(source);
            if (!port->number || port->tried_v6 || connect_v6(port) < 0)
                stream_fail(port->stream, error, NULL);
            return;
        }
        port->connected = port->silent = true;
        stream_event(port->stream, EVENT_CONNECTED, NULL);
    }
    send_to_peer(port);
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR) && !port->peer_ended) {
        port->silent = false;
        stream_wake(port->stream);
    }
    if (!finish_if_done(port))
        rearm(port);
}

static void port_data(struct stream *stream, const uint8_t *bytes, size_t length)
{
    struct port *port = stream->owner;
    if (port->start) {
        memmove(port->bytes, port->bytes + port->start, port->end - port->start);
        port->end -= port->start;
        port->start = 0;
    }
    if (port->end + length > port->capacity) {
        uint8_t *larger = realloc(port->bytes, port->end + length + 4096);
        if (!larger) {
            stream_fail(stream, ENOMEM, NULL);
            return;
        }
        port->bytes = larger;
        port->capacity = port->end + length + 4096;
    }
    memcpy(port->bytes + port->end, bytes, length);
    port->end += length;
    if (port->connected)
        send_to_peer(port);
    rearm(port);
}

static void port_end(struct stream *stream)
{
    struct port *port = stream->owner;
    port->host_ended = true;
    finish_if_done(port);
}

void port_open(struct stream *stream, struct fields fields)
{
    static const struct stream_ops ops = {.data = port_data, .end = port_end, .pump = port_pump, .closed = port_closed};
    uint64_t number = fields_number_or(fields, TAG_PORT, 0);
    char path[PATH_MAX];
    struct port *port = number <= 65535 ? calloc(1, sizeof *port) : NULL;
    if (!port) {
        stream_fail(stream, number > 65535 ? EINVAL : ENOMEM, "PORT");
        return;
    }
    port->stream = stream;
    port->number = (uint16_t)number;
    port->source = (struct source){.fd = -1, .ready = port_ready};
    stream_serve(stream, &ops, port);
    int result = number ? (connect_v4(port) < 0 ? connect_v6(port) : 0)
                        : (fields_path(fields, TAG_PATH, path) < 0 ? -1 : connect_path(port, path));
    if (result < 0)
        stream_fail(stream, errno, number ? NULL : "unix socket");
}
