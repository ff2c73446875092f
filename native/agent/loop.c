/* The event loop: epoll for descriptors, a short list for timers. */
#include "agent.h"

#include <errno.h>
#include <malloc.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

static int epoll_fd = -1;
static struct timer *timers;
static void **garbage;
static size_t garbage_count, garbage_capacity;

uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void loop_init(void)
{
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (epoll_fd < 0)
        _exit(70);
}

int source_watch(struct source *source, uint32_t events)
{
    if (events == source->events)
        return 0;
    /* Remove a descriptor that is not watched, because epoll would report its hang-up forever. */
    int how = !source->events ? EPOLL_CTL_ADD : !events ? EPOLL_CTL_DEL : EPOLL_CTL_MOD;
    struct epoll_event event = {.events = events, .data.ptr = source};
    if (epoll_ctl(epoll_fd, how, source->fd, &event) < 0)
        return -1;
    source->events = events;
    return 0;
}

void source_close(struct source *source)
{
    if (source->fd < 0)
        return;
    source_watch(source, 0);
    close(source->fd);
    source->fd = -1;
}

void timer_set(struct timer *timer, uint64_t due_ns)
{
    if (timer->due_ns) {
        *timer->link = timer->next;
        if (timer->next)
            timer->next->link = timer->link;
    }
    timer->due_ns = due_ns;
    if (!due_ns)
        return;
    timer->next = timers;
    timer->link = &timers;
    if (timers)
        timers->link = &timer->next;
    timers = timer;
}

/* Return free memory to the system when the agent is idle. */
static void give_back(struct timer *timer)
{
    (void)timer;
#ifdef __GLIBC__
    malloc_trim(0);
#endif
}

void free_later(void *memory)
{
    static struct timer giving_back = {.fire = give_back};
    if (!giving_back.due_ns)
        timer_set(&giving_back, now_ns() + 1000 * MS);
    if (garbage_count == garbage_capacity) {
        size_t capacity = garbage_capacity ? garbage_capacity * 2 : 64;
        void **larger = realloc(garbage, capacity * sizeof *larger);
        if (!larger)
            return; /* a leak is better than a dangling pointer */
        garbage = larger;
        garbage_capacity = capacity;
    }
    garbage[garbage_count++] = memory;
}

static int wait_ms(void)
{
    if (!timers)
        return -1;
    uint64_t first = UINT64_MAX;
    for (struct timer *timer = timers; timer; timer = timer->next)
        if (timer->due_ns < first)
            first = timer->due_ns;
    uint64_t now = now_ns();
    if (first <= now)
        return 0;
    uint64_t ms = (first - now + 999999) / 1000000;
    return ms > 60000 ? 60000 : (int)ms;
}

static void fire_timers(void)
{
    uint64_t now = now_ns();
    for (;;) {
        struct timer *due = timers;
        while (due && due->due_ns > now)
            due = due->next;
        if (!due)
            return;
        timer_set(due, 0);
        due->fire(due);
    }
}

void loop_run(void)
{
    struct epoll_event events[64];
    for (;;) {
        int count = epoll_wait(epoll_fd, events, 64, wait_ms());
        if (count < 0 && errno != EINTR)
            _exit(71);
        for (int i = 0; i < count; i++) {
            struct source *source = events[i].data.ptr;
            if (source->fd >= 0 && source->events)
                source->ready(source, events[i].events);
        }
        if (timers)
            fire_timers();
        connections_flush();
        while (garbage_count)
            free(garbage[--garbage_count]);
    }
}
