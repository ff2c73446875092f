/* The words of the plan. They come from our own process, but a bug there must end as an error here and nothing else. */
#include "native.h"

char *next_word(struct list *list, struct worker *worker)
{
    char *word = list->at, *end = word;
    while (end < list->end && *end)
        end++;
    if (end >= list->end)
        worker->give_up(worker, EINVAL);
    list->at = end + 1;
    return word;
}

unsigned long next_number(struct list *list, struct worker *worker)
{
    const char *word = next_word(list, worker);
    unsigned long value = 0;
    if (!*word)
        worker->give_up(worker, EINVAL);
    for (; *word; word++)
        if (*word < '0' || *word > '9' || __builtin_mul_overflow(value, 10, &value) ||
            __builtin_add_overflow(value, (unsigned long)(*word - '0'), &value))
            worker->give_up(worker, EINVAL);
    return value;
}

/* Whether NAME is one of the FLAGS, which are separated by commas. */
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

uint64_t attribute_flags(const char *flags)
{
    return (has_flag(flags, "ro") ? 1u : 0) | (has_flag(flags, "nosuid") ? 2u : 0) | (has_flag(flags, "nodev") ? 4u : 0) |
           (has_flag(flags, "noexec") ? 8u : 0);
}
