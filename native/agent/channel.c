/* Channels: the output of a process, kept in rings with absolute offsets.
 *
 * While a stream is attached, output that it has not received is not overwritten: when the ring is full, the agent stops reading,
 * which blocks the command. Without a stream, the oldest output is overwritten. Once the process is complete, its rings do not
 * change: further output of processes that it left running is discarded.
 */
#define _GNU_SOURCE
#include "process.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/uio.h>
#include <unistd.h>

static uint64_t output_bytes;

uint64_t processes_output_bytes(void) { return output_bytes; }

static void grow(struct channel *channel)
{
    size_t capacity = channel->capacity ? channel->capacity * 4 : 4096;
    if (capacity > channel->most)
        capacity = channel->most;
    uint8_t *larger = malloc(capacity);
    if (!larger)
        return;
    for (uint64_t at = channel->start; at < channel->end;) {
        size_t from = (size_t)(at % channel->capacity), run = channel->capacity - from;
        size_t to = (size_t)(at % capacity);
        if (run > channel->end - at)
            run = (size_t)(channel->end - at);
        if (run > capacity - to)
            run = capacity - to;
        memcpy(larger + to, channel->bytes + from, run);
        at += run;
    }
    free(channel->bytes);
    channel->bytes = larger;
    channel->capacity = capacity;
}

static size_t make_room(struct channel *channel)
{
    size_t kept = (size_t)(channel->end - channel->start);
    if (kept == channel->capacity && channel->capacity < channel->most)
        grow(channel);
    if (kept == channel->capacity) {
        uint64_t forgettable = (channel->process->stream ? channel->sent : channel->end) - channel->start;
        channel->start += forgettable < CHUNK ? forgettable : CHUNK;
    }
    return channel->capacity - (size_t)(channel->end - channel->start);
}

static ssize_t read_parts(struct channel *channel, const struct iovec *parts, int count)
{
    ssize_t length;
    do
        length = readv(channel->source.fd, parts, count);
    while (length < 0 && errno == EINTR);
    if (length < 0)
        return errno == EAGAIN ? -1 : 0; /* EIO means that no process has the terminal open */
    output_bytes += (uint64_t)length;
    return length;
}

ssize_t channel_fill(struct channel *channel, size_t most)
{
    if (channel->process->complete) {
        uint8_t ignored[16384];
        return read_parts(channel, &(struct iovec){ignored, sizeof ignored}, 1);
    }
    size_t room = make_room(channel);
    if (!room)
        return -2;
    if (room > most)
        room = most;
    size_t at = (size_t)(channel->end % channel->capacity), run = channel->capacity - at;
    struct iovec parts[2] = {{channel->bytes + at, run < room ? run : room}, {channel->bytes, run < room ? room - run : 0}};
    ssize_t length = read_parts(channel, parts, parts[1].iov_len ? 2 : 1);
    if (length > 0)
        channel->end += (uint64_t)length;
    return length;
}

/* Read at most what is in the pipe now, because a writer that never stops would keep the agent here forever. */
ssize_t channel_drain(struct channel *channel)
{
    int waiting = 0;
    ssize_t got = 1;
    if (channel->source.fd < 0)
        return 0;
    ioctl(channel->source.fd, FIONREAD, &waiting);
    channel->drain_to = channel->end + (uint64_t)(waiting > 0 ? waiting : 0);
    while (channel->end < channel->drain_to && got > 0)
        got = channel_fill(channel, CHUNK);
    return got;
}

void channel_say(struct channel *channel, const char *text)
{
    for (; *text && make_room(channel); text++)
        channel->bytes[channel->end++ % channel->capacity] = (uint8_t)*text;
}

bool channel_pump(struct channel *channel, struct stream *stream)
{
    uint64_t until = channel->process->complete ? channel->final : channel->end;
    size_t room;
    if (channel->sent >= until)
        return false;
    size_t at = (size_t)(channel->sent % channel->capacity), run = channel->capacity - at;
    if (run > until - channel->sent)
        run = (size_t)(until - channel->sent);
    uint8_t *payload = stream_reserve(stream, run < CHUNK ? run : CHUNK, &room);
    if (!payload)
        return false;
    memcpy(payload, channel->bytes + at, room);
    stream_commit(stream, channel->index + 1, room);
    channel->sent += room;
    return true;
}
