/* Lists of processes: those that the agent keeps, and how often those that are restarted were. */
#define _GNU_SOURCE
#include "process.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { HEAD = 2, LISTED = 17, RESTARTED = 8 };
enum { STATE_ENDED = 0, STATE_RUNS = 1, STATE_WAITS = 2 };

struct listing {
    size_t length, sent;
    uint8_t bytes[];
};

static bool listing_pump(struct stream *stream)
{
    struct listing *listing = stream->owner;
    size_t room;
    if (listing->sent == listing->length) {
        struct builder fields;
        fields.length = 0;
        add_number(&fields, TAG_CAPACITY, MAX_PROCESSES);
        stream_finish(stream, &fields);
        return false;
    }
    uint8_t *payload = stream_reserve(stream, listing->length - listing->sent < CHUNK ? listing->length - listing->sent : CHUNK, &room);
    if (!payload)
        return false;
    memcpy(payload, listing->bytes + listing->sent, room);
    stream_commit(stream, 0, room);
    listing->sent += room;
    return true;
}

static void listing_closed(struct stream *stream) { free(stream->owner); }

static const struct stream_ops listing_ops = {.pump = listing_pump, .closed = listing_closed};

/* Return an empty list with room for all processes, or NULL after an error was sent. */
static struct listing *new_listing(struct stream *stream)
{
    struct listing *listing = calloc(1, sizeof *listing + process_count * (size_t)(MAX_ID + HEAD + LISTED));
    if (!listing)
        stream_fail(stream, ENOMEM, NULL);
    return listing;
}

/* Add a record that begins with the id of the process, and return where its other `length` bytes go. */
static uint8_t *add_record(struct listing *listing, const struct process *process, size_t length)
{
    uint8_t *at = listing->bytes + listing->length;
    put_u16(at, (unsigned)process->id_length);
    memcpy(at + HEAD, process->id, process->id_length);
    listing->length += HEAD + process->id_length + length;
    return at + HEAD + process->id_length;
}

void process_list(struct stream *stream)
{
    struct listing *listing = new_listing(stream);
    if (!listing)
        return;
    for (struct process *process = processes; process; process = process->next) {
        if (!process->id_length)
            continue;
        uint8_t *at = add_record(listing, process, LISTED);
        put_u64(at, (uint64_t)process->pid);
        at[8] = !process->complete;
        put_u64(at + 9, now_ns() - process->started_ns);
    }
    stream_serve(stream, &listing_ops, listing);
    stream_wake(stream);
}

void process_restarts(struct stream *stream)
{
    struct listing *listing = new_listing(stream);
    if (!listing)
        return;
    for (struct process *process = processes; process; process = process->next) {
        const struct restart *restart = &process->restart;
        if (!process->id_length || !restart->bytes)
            continue;
        uint8_t *at = add_record(listing, process, RESTARTED);
        put_u32(at, restart->count);
        at[4] = process->complete ? STATE_ENDED : restart->pending ? STATE_WAITS : STATE_RUNS;
        at[5] = (uint8_t)(process->complete ? process->cause : restart->last_cause);
        put_u16(at + 6, process->complete ? (unsigned)process->status & 0xffff : restart->last_status & 0xffff);
    }
    stream_serve(stream, &listing_ops, listing);
    stream_wake(stream);
}
