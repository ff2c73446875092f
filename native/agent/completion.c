/* The end of a process, and the output that comes before it.
 *
 * A process is complete when it has exited and everything that was in its pipes at that moment is in the rings. If its tree is
 * being killed, it is complete only when the tree is gone, so that the host can rely on the answer.
 */
#define _GNU_SOURCE
#include "process.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

/* A status must arrive after all output that was written before it, so read that first. Returns false if there is no room yet. */
static bool take_output_before_status(struct process *process)
{
    for (int i = 0; i < 2; i++) {
        struct channel *channel = &process->channels[i];
        if (channel_drain(channel) == 0)
            source_close(&channel->source);
        if (channel->source.fd >= 0 && channel->end < channel->drain_to)
            return false;
        process->said_before[i] = channel->end;
    }
    return true;
}

/* How much status to read: what is there now, or the end of the file if nothing is. */
static size_t waiting_status(const struct channel *channel)
{
    int waiting = 0;
    ioctl(channel->source.fd, FIONREAD, &waiting);
    return waiting > 0 && waiting < CHUNK ? (size_t)waiting : CHUNK;
}

void channel_ready(struct source *source, uint32_t events)
{
    struct channel *channel = (struct channel *)((char *)source - offsetof(struct channel, source));
    struct process *process = channel->process;
    (void)events;
    size_t most = CHUNK;
    bool wait = false;
    if (channel->index == 2 && !process->complete) {
        most = waiting_status(channel); /* more may come while output is read, and after more output */
        wait = !take_output_before_status(process);
    }
    ssize_t got = wait ? -2 : channel_fill(channel, most);
    if (got == 0)
        source_close(source);
    else if (got == -2)
        source_watch(source, 0); /* the stream's pump will watch it again */
    if (process->stream)
        stream_wake(process->stream);
    check_complete(process);
}

void listen_again(struct process *process)
{
    for (int i = 0; i < CHANNELS; i++)
        if (process->channels[i].source.fd >= 0)
            source_watch(&process->channels[i].source, EPOLLIN);
}

void check_complete(struct process *process)
{
    if (!process->exited || process->complete || process->restart.pending
        || (process->killing && !process->gone && now_ns() - process->kill_ns < GIVE_UP_NS))
        return;
    for (int i = 0; i < CHANNELS; i++) {
        struct channel *channel = &process->channels[i];
        if (channel->source.fd >= 0 && (channel->end < channel->drain_to || process->settle.due_ns))
            return;
    }
    process->complete = true;
    for (int i = 0; i < CHANNELS; i++)
        process->channels[i].final = process->channels[i].end;
    timer_set(&process->settle, 0);
    if (process->stream)
        stream_wake(process->stream);
    else
        drop_if_forgotten(process);
}

void settle_fire(struct timer *timer)
{
    check_complete(OWNER(timer, settle));
}

/* Note how much is still in the pipes, and read it. */
static void settle(struct process *process)
{
    for (int i = 0; i < CHANNELS; i++) {
        struct channel *channel = &process->channels[i];
        if (channel->source.fd < 0)
            continue;
        if (process->flags & START_PTY) /* a terminal delivers output with a short delay */
            timer_set(&process->settle, now_ns() + 100 * MS);
        if (channel_drain(channel) == 0)
            source_close(&channel->source);
    }
    check_complete(process);
}

static void process_exited(struct process *process)
{
    process->exited = true;
    process->ended_ns = now_ns();
    timer_set(&process->deadline, 0);
    source_close(&process->input);
    if (process->by_sudo)
        sudo_ended(process);
    if (process->stage == STAGE_EXEC) {
        char text[PATH_MAX + 64];
        bool missing = process->error == ENOENT && !(process->flags & START_EXISTING); /* otherwise its interpreter is missing */
        snprintf(text, sizeof text, "atoll: %.4000s: %s\n", process->launch.argv[0], missing ? "not found" : strerror(process->error));
        channel_say(&process->channels[process->flags & (START_MERGE | START_PTY) ? 0 : 1], text);
        process->status = (missing ? 127 : 126) << 8;
    } else if (process->stage != STAGE_NONE && !process->restart.count) {
        process->flags |= START_FORGET;
        process->complete = true;
        process->id_length = 0; /* the process never existed, so the same id may be used again immediately */
        struct stream *stream = process->stream;
        const char *what = process->stage == STAGE_CWD    ? process->launch.cwd
                           : process->stage == STAGE_USER ? "cannot become that user"
                                                          : "cannot start a process";
        if (stream)
            stream_fail(stream, process->error, what);
        return;
    }
    if (restart_follows(process)) {
        restart_begin(process);
        return;
    }
    if (process->cause)
        start_kill(process, process->cause); /* the deadline has passed: kill everything that it left running */
    else
        process->cause = WIFSIGNALED(process->status) ? CAUSE_SIGNAL : CAUSE_EXIT;
    settle(process);
}

void process_gone(struct process *process)
{
    process->gone = true;
    timer_set(&process->kill_again, 0);
    calm_down();
    if (!process->exited) { /* a process in the sandbox killed the supervisor */
        if (!process->cause)
            process->cause = CAUSE_LOST;
        process->status = SIGKILL;
        process_exited(process);
    } else if (process->killing && !process->complete) {
        settle(process);
    }
    if (process->restart.pending)
        restart_later(process);
    while (process->killer_count)
        stream_finish(process->killers[0], NULL);
    launch_release(&process->launch);
    drop_if_forgotten(process);
}

static void tell_started(struct process *process)
{
    struct builder fields;
    fields.length = 0;
    process->told_started = true;
    if (!process->stream)
        return;
    add_number(&fields, TAG_PID, (uint64_t)process->pid);
    stream_event(process->stream, EVENT_STARTED, &fields);
    if (process->flags & START_DETACH)
        stream_finish(process->stream, NULL);
}

static void take_notice(struct process *process)
{
    if (process->flags & START_STARTED && !process->told_started && process->stage == STAGE_NONE)
        tell_started(process);
    if (process->ended && !process->exited)
        process_exited(process);
}

void notices_ready(struct source *source, uint32_t events)
{
    struct process *noticed[64];
    ssize_t length;
    (void)events;
    do {
        length = read(source->fd, noticed, sizeof noticed);
        for (ssize_t i = 0; i < length / (ssize_t)sizeof *noticed; i++)
            take_notice(noticed[i]);
    } while (length == sizeof noticed);
}
