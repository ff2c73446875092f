/* The sources of connections: a listening socket, or two descriptors that the agent was started with. */
#define _GNU_SOURCE
#include "connection.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

static struct source listener = {.fd = -1};
static struct timer accept_again;

static void not_blocking(int fd) { fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK); }

void accept_more(void)
{
    if (listener.fd >= 0 && !accept_again.due_ns)
        source_watch(&listener, EPOLLIN);
}

static void accept_fire(struct timer *timer)
{
    (void)timer;
    source_watch(&listener, EPOLLIN);
}

static void accept_ready(struct source *source, uint32_t events)
{
    (void)events;
    while (connections_count() < MAX_CONNECTIONS) {
        int fd = accept4(source->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0 && (errno == EAGAIN || errno == ECONNABORTED || errno == EINTR))
            return;
        if (fd < 0 || connection_open(fd, fd, false) < 0) {
            if (fd >= 0)
                close(fd);
            timer_set(&accept_again, now_ns() + 100 * MS); /* no descriptors or no memory: an immediate retry would fail again */
            break;
        }
    }
    source_watch(source, 0); /* until a connection ends */
}

void connections_listen(int fd)
{
    not_blocking(fd);
    accept_again.fire = accept_fire;
    listener = (struct source){.fd = fd, .ready = accept_ready};
    if (source_watch(&listener, EPOLLIN) < 0)
        _exit(72);
}

/* A fifo without a writer is always at its end, which epoll would report without pause. So it is checked from time to time. If the
 * last connection did not end properly, the rest of its data, which may start in the middle of a frame, is discarded. */
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

void look_later(int in, int out, bool ended)
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
    bool again = fstat(in, &info) == 0 && S_ISFIFO(info.st_mode); /* a socket that was closed by its peer cannot be reopened */
    not_blocking(in);
    not_blocking(out);
    if (connection_open(in, out, again) < 0)
        look_later(in, out, true);
}
