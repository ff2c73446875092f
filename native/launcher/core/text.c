/* Formatting and parsing text without a C library. */
#include "core.h"

void add(struct text *text, const char *more)
{
    while (*more && text->length < sizeof text->bytes - 1)
        text->bytes[text->length++] = *more++;
    text->bytes[text->length] = '\0';
}

void add_number(struct text *text, unsigned long number)
{
    char digits[24], *digit = digits + sizeof digits;
    *--digit = '\0';
    do
        *--digit = (char)('0' + number % 10);
    while (number /= 10);
    add(text, digit);
}

void add_failure(struct text *text, const struct worker *worker, long error)
{
    add(text, "failed ");
    add_number(text, (unsigned long)error);
    add(text, " ");
    add(text, worker->step);
    add(text, " ");
    add(text, worker->detail);
}

struct text proc_path(unsigned long pid, const char *name)
{
    struct text path = {.length = 0};
    add(&path, "/proc/");
    add_number(&path, pid);
    add(&path, "/");
    add(&path, name);
    return path;
}

static unsigned digit_of(char c)
{
    return c >= '0' && c <= '9' ? (unsigned)(c - '0') : (c | 32) >= 'a' && (c | 32) <= 'f' ? (unsigned)((c | 32) - 'a' + 10) : 16;
}

/* Parse a number and move AT behind its digits. Returns false if there is none or it is too large. */
bool parse_number(const char **at, unsigned base, unsigned long *number)
{
    const char *digit = *at;
    unsigned long value = 0;
    for (; digit_of(*digit) < base; digit++)
        if (__builtin_mul_overflow(value, base, &value) || __builtin_add_overflow(value, (unsigned long)digit_of(*digit), &value))
            return false;
    if (digit == *at)
        return false;
    *at = digit;
    *number = value;
    return true;
}
