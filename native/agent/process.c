/* Processes: starting them and keeping their state until they are released.
 *
 * launch.c and supervise.c start a process, stdio.c opens its standard streams, channel.c keeps its output, process_stream.c sends
 * that to the attached stream, completion.c and reaper.c detect its end, restart.c starts it again, termination.c and kill.c kill
 * it, listing.c lists all.
 */
#define _GNU_SOURCE
#include "process.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { DEFAULT_KEEP = 1 << 20, MOST_KEEP = 64 << 20 };

struct process *processes;
unsigned process_count;

struct process *find_process(struct fields fields)
{
    struct field id;
    if (!fields_find(fields, TAG_ID, &id) || !id.length || id.length > MAX_ID)
        return NULL;
    for (struct process *process = processes; process; process = process->next)
        if (process->id_length == id.length && memcmp(process->id, id.value, id.length) == 0)
            return process;
    return NULL;
}

void process_drop(struct process *process)
{
    if (process->dropped)
        return;
    process->dropped = true;
    *process->link = process->next;
    if (process->next)
        process->next->link = process->link;
    process_count--;
    for (int i = 0; i < CHANNELS; i++) {
        source_close(&process->channels[i].source);
        free(process->channels[i].bytes);
    }
    source_close(&process->input);
    free(process->input_bytes);
    timer_set(&process->deadline, 0);
    timer_set(&process->kill_again, 0);
    timer_set(&process->settle, 0);
    launch_release(&process->launch);
    restart_release(process);
    if (process->by_sudo)
        sudo_dropped();
    free_later(process);
}

void drop_if_forgotten(struct process *process)
{
    if (process->gone && process->complete && !process->stream && process->flags & START_FORGET)
        process_drop(process);
}

/* --- starting ------------------------------------------------------------------------------------------------------------- */

static bool make_place(void)
{
    struct process *oldest = NULL;
    if (process_count < MAX_PROCESSES)
        return true;
    for (struct process *process = processes; process; process = process->next)
        if (process->gone && process->complete && !process->stream)
            oldest = process; /* the list starts with the newest */
    if (oldest)
        process_drop(oldest);
    return oldest;
}

static struct process *new_process(uint64_t keep)
{
    struct process *process = make_place() ? calloc(1, sizeof *process) : NULL;
    if (!process)
        return NULL;
    process->input = (struct source){.fd = -1, .ready = input_ready};
    for (unsigned i = 0; i < CHANNELS; i++) {
        struct channel *channel = &process->channels[i];
        channel->source = (struct source){.fd = -1, .ready = channel_ready};
        channel->process = process;
        channel->index = i;
        channel->most = (keep > MOST_KEEP ? MOST_KEEP : (size_t)keep) + CHUNK;
    }
    process->deadline.fire = deadline_fire;
    process->kill_again.fire = kill_again_fire;
    process->settle.fire = settle_fire;
    process->next = processes;
    process->link = &processes;
    if (processes)
        processes->link = &process->next;
    processes = process;
    process_count++;
    return process;
}

int process_begin(struct process *process, struct fields fields)
{
    if (launch_prepare(&process->launch, fields) < 0)
        return -1;
    if (open_streams(process, fields) < 0)
        return -1;
    process->launch.tell_started = process->flags & START_STARTED;
    process->started_ns = now_ns();
    calm_down();
    if (supervise(process) < 0)
        return -1;
    launch_close(&process->launch);
    uint64_t deadline_ms = fields_number_or(fields, TAG_DEADLINE_MS, 0);
    process->grace_ns = fields_number_or(fields, TAG_GRACE_MS, 0) % 86400000 * MS;
    if (deadline_ms)
        timer_set(&process->deadline, process->started_ns + (deadline_ms > 1000000000000 ? 1000000000000 : deadline_ms) * MS);
    listen_again(process);
    return 0;
}

struct process *process_without_id(void) { return new_process(0); }

static bool program_exists(struct fields fields)
{
    char *path = fields_text(fields, TAG_ARG, PATH_MAX - 1);
    bool exists = path && access(path, F_OK) == 0;
    free(path);
    return exists;
}

void process_start(struct stream *stream, struct fields fields)
{
    struct field id;
    struct process *process = find_process(fields);
    if (process) {
        attach(process, stream, (struct fields){NULL, 0});
        return;
    }
    if (!fields_find(fields, TAG_ID, &id) || !id.length || id.length > MAX_ID) {
        stream_fail(stream, EINVAL, "a process needs an ID");
        return;
    }
    if (fields_number_or(fields, TAG_FLAGS, 0) & START_EXISTING && !program_exists(fields)) {
        stream_fail(stream, ENOENT, "no such program");
        return;
    }
    process = new_process(fields_number_or(fields, TAG_KEEP, DEFAULT_KEEP));
    if (!process) {
        stream_fail(stream, EAGAIN, "too many processes");
        return;
    }
    memcpy(process->id, id.value, id.length);
    process->id_length = id.length;
    process->flags = (unsigned)fields_number_or(fields, TAG_FLAGS, 0);
    if (process->flags & START_DETACH)
        process->flags |= START_STARTED;
    if (restart_prepare(process, fields) < 0 || process_begin(process, fields) < 0) {
        int error = errno;
        process_drop(process);
        stream_fail(stream, error, "cannot start a process");
        return;
    }
    process->stream = stream;
    stream_serve(stream, &process_ops, process);
}

/* --- releasing ------------------------------------------------------------------------------------------------------------ */

void process_release(struct stream *stream, struct fields fields)
{
    struct process *process = find_process(fields);
    if (!process) {
        stream_fail(stream, ENOENT, "no such process");
    } else if (!process->complete) {
        stream_fail(stream, EBUSY, NULL);
    } else {
        process->flags |= START_FORGET; /* keeps the entry while processes that it left running can still be killed */
        if (process->stream)
            stream_fail(process->stream, ESTALE, "released");
        drop_if_forgotten(process);
        stream_finish(stream, NULL);
    }
}
