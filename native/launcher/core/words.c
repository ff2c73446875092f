/* The words of a plan. They come from Atoll itself, but a bug there must only cause an error here. */
#include "core.h"

char *next_word(struct worker *worker)
{
    char *word = worker->at, *end = word;
    while (end < worker->end && *end)
        end++;
    if (end >= worker->end)
        worker->give_up(worker, EINVAL);
    worker->at = end + 1;
    return word;
}

unsigned long next_number(struct worker *worker)
{
    const char *word = next_word(worker);
    unsigned long value;
    if (!parse_number(&word, 10, &value) || *word)
        worker->give_up(worker, EINVAL);
    return value;
}

char *next_subject(struct worker *worker)
{
    char *word = next_word(worker);
    worker->detail = word;
    return word;
}

/* Return whether NAME is one of the FLAGS, which are separated by commas. */
bool has_flag(const char *flags, const char *name)
{
    size_t length = strlen(name);
    while (*flags) {
        size_t here = 0;
        while (flags[here] && flags[here] != ',')
            here++;
        bool same = here == length;
        for (size_t i = 0; same && i < length; i++)
            same = flags[i] == name[i];
        if (same)
            return true;
        flags += here + (flags[here] == ',');
    }
    return false;
}

/* Convert names to flags, which have the same values for mount(2) and mount_setattr(2). */
uint64_t attribute_flags(const char *flags)
{
    return (has_flag(flags, "ro") ? 1u : 0) | (has_flag(flags, "nosuid") ? 2u : 0) | (has_flag(flags, "nodev") ? 4u : 0) |
           (has_flag(flags, "noexec") ? 8u : 0);
}
