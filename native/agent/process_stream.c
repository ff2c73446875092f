/* The stream of a process: output to the attached stream, and input from it. Only one stream is attached at a time; a new one
 * replaces it.
 */
#define _GNU_SOURCE
#include "process.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST_INPUT = 4 << 20 /* each stream that attaches grants new credit, so this bounds the sum */ };

/* --- output ------------------------------------------------------------------------------------------------------------- */

static void finish(struct process *process)
{
    struct builder fields;
    fields.length = 0;
    add_number(&fields, TAG_CAUSE, process->cause);
    add_number(&fields, TAG_PID, (uint64_t)process->pid);
    if (WIFSIGNALED(process->status))
        add_number(&fields, TAG_TERM_SIGNAL, (uint64_t)WTERMSIG(process->status));
    else
        add_number(&fields, TAG_EXIT_CODE, (uint64_t)WEXITSTATUS(process->status));
    for (unsigned i = 0; i < CHANNELS; i++)
        add_number(&fields, TAG_END_1 + i, process->channels[i].final);
    add_number(&fields, TAG_DURATION_NS, process->ended_ns - process->started_ns);
    add_number(&fields, TAG_CPU_NS, process->cpu_ns);
    add_number(&fields, TAG_MAX_RSS_BYTES, process->max_rss_bytes);
    stream_finish(process->stream, &fields);
}

static bool process_pump(struct stream *stream)
{
    struct process *process = stream->owner;
    struct channel *channels = process->channels;
    bool sent = channel_pump(&channels[0], stream);
    sent |= channel_pump(&channels[1], stream);
    if (channels[0].sent >= process->said_before[0] && channels[1].sent >= process->said_before[1])
        sent |= channel_pump(&channels[2], stream);
    if (process->complete) {
        bool all = true;
        for (int i = 0; i < CHANNELS; i++)
            all &= channels[i].sent >= channels[i].final;
        if (all) {
            finish(process);
            return false;
        }
    } else if (sent) {
        listen_again(process);
    }
    return sent;
}

/* --- input -------------------------------------------------------------------------------------------------------------- */

/* Remove bytes from the waiting input, and grant credit for them. */
static void input_taken(struct process *process, size_t length)
{
    size_t unowed = process->input_end - process->input_start - process->input_owed; /* these are taken first */
    size_t owed = length > unowed ? length - unowed : 0;
    process->input_start += length;
    process->input_owed -= owed;
    if (process->stream && owed)
        stream_consumed(process->stream, owed);
}

static void write_input(struct process *process)
{
    while (process->input_start < process->input_end && process->input.fd >= 0) {
        ssize_t (*put)(int, const void *, size_t) = process->flags & START_PTY ? gvisor_write : write;
        ssize_t length = put(process->input.fd, process->input_bytes + process->input_start, process->input_end - process->input_start);
        if (length < 0 && errno == EINTR)
            continue;
        if (length < 0 && errno == EAGAIN)
            break;
        if (length < 0)
            source_close(&process->input);
        else
            input_taken(process, (size_t)length);
    }
    if (process->input.fd < 0) /* nothing reads the input: discard the bytes */
        input_taken(process, process->input_end - process->input_start);
    if (process->input_start == process->input_end) {
        process->input_start = process->input_end = 0;
        if (process->input_ended)
            source_close(&process->input);
    }
    if (process->input.fd >= 0)
        source_watch(&process->input, process->input_end ? EPOLLOUT : 0);
}

void input_ready(struct source *source, uint32_t events)
{
    (void)events;
    write_input(OWNER(source, input));
}

static bool queue_input(struct process *process, const uint8_t *bytes, size_t length)
{
    if (process->input_start) {
        memmove(process->input_bytes, process->input_bytes + process->input_start, process->input_end - process->input_start);
        process->input_end -= process->input_start;
        process->input_start = 0;
    }
    if (process->input_end + length > MOST_INPUT)
        return false;
    if (process->input_capacity - process->input_end < length) {
        size_t capacity = process->input_end + length + 4096;
        uint8_t *larger = realloc(process->input_bytes, capacity);
        if (!larger)
            return false;
        process->input_bytes = larger;
        process->input_capacity = capacity;
    }
    memcpy(process->input_bytes + process->input_end, bytes, length);
    process->input_end += length;
    return true;
}

static void process_data(struct stream *stream, const uint8_t *bytes, size_t length)
{
    struct process *process = stream->owner;
    if (process->input.fd < 0 || process->input_ended) {
        stream_consumed(stream, length);
    } else if (!queue_input(process, bytes, length)) {
        stream_fail(stream, ENOMEM, "standard input");
    } else {
        process->input_owed += length;
        write_input(process);
    }
}

static void process_end(struct stream *stream)
{
    struct process *process = stream->owner;
    if (process->input.fd < 0)
        return;
    static const uint8_t end_of_file = 4;
    if (process->flags & START_PTY)
        queue_input(process, &end_of_file, 1);
    else
        process->input_ended = true;
    write_input(process);
}

static void process_control(struct stream *stream, unsigned verb, struct fields fields)
{
    if (verb == VERB_RESIZE)
        resize_terminal(stream->owner, fields);
    else if (verb == VERB_SIGNAL)
        send_signal(stream->owner, fields_number_or(fields, TAG_SIGNAL, SIGKILL), false);
}

static void process_closed(struct stream *stream)
{
    struct process *process = stream->owner;
    if (process->stream != stream)
        return; /* another stream is attached */
    process->stream = NULL;
    process->input_owed = 0;
    listen_again(process); /* old output may be overwritten from now on */
    drop_if_forgotten(process);
}

const struct stream_ops process_ops = {
    .data = process_data,
    .end = process_end,
    .control = process_control,
    .pump = process_pump,
    .closed = process_closed,
};

/* --- attaching ---------------------------------------------------------------------------------------------------------- */

void attach(struct process *process, struct stream *stream, struct fields fields)
{
    struct builder event;
    struct stream *former = process->stream;
    event.length = 0;
    process->stream = stream; /* set this before detaching the old stream, so that a process with START_FORGET is not dropped */
    process->input_owed = 0;
    stream_serve(stream, &process_ops, process);
    if (former)
        stream_fail(former, ESTALE, "taken over by another connection");
    add_number(&event, TAG_PID, (uint64_t)process->pid);
    add_number(&event, TAG_RUNNING, !process->complete);
    for (unsigned i = 0; i < CHANNELS; i++) {
        struct channel *channel = &process->channels[i];
        uint64_t end = process->complete ? channel->final : channel->end;
        uint64_t from = fields_number_or(fields, TAG_OFFSET_1 + i, 0);
        if (from < channel->start)
            from = channel->start;
        if (from > end)
            from = end;
        channel->sent = from;
        add_number(&event, TAG_OFFSET_1 + i, from);
    }
    stream_event(stream, EVENT_ATTACHED, &event);
    listen_again(process);
    stream_wake(stream);
}

void process_attach(struct stream *stream, struct fields fields)
{
    struct process *process = find_process(fields);
    if (process)
        attach(process, stream, fields);
    else
        stream_fail(stream, ENOENT, "no such process");
}
