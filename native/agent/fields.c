/* Fields: tag, length, value. They are validated once when a frame arrives; later code relies on that. */
#include "agent.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool fields_next(struct fields *rest, struct field *field)
{
    if (rest->length < 6)
        return false;
    field->tag = get_u16(rest->bytes);
    field->length = get_u32(rest->bytes + 2);
    if (field->length > rest->length - 6)
        return false;
    field->value = rest->bytes + 6;
    rest->bytes += 6 + field->length;
    rest->length -= 6 + field->length;
    return true;
}

static bool is_number(unsigned tag)
{
    return (tag >= TAG_FLAGS && tag <= TAG_GRACE_MS) || (tag >= TAG_ROWS && tag <= TAG_ERRNO) || (tag >= TAG_MODE && tag <= TAG_MTIME_NS)
           || (tag >= TAG_OFFSET && tag <= TAG_DEVICE) || tag == TAG_PORT || tag == TAG_RESTART;
}

bool fields_valid(struct fields fields)
{
    struct field field;
    while (fields_next(&fields, &field))
        if (is_number(field.tag) && field.length != 8)
            return false; /* ignoring a malformed field would change the meaning of the request */
    return fields.length == 0;
}

bool fields_find(struct fields fields, unsigned tag, struct field *field)
{
    while (fields_next(&fields, field))
        if (field->tag == tag)
            return true;
    return false;
}

bool fields_number(struct fields fields, unsigned tag, uint64_t *number)
{
    struct field field;
    if (!fields_find(fields, tag, &field))
        return false;
    *number = get_u64(field.value);
    return true;
}

uint64_t fields_number_or(struct fields fields, unsigned tag, uint64_t otherwise)
{
    uint64_t number;
    return fields_number(fields, tag, &number) ? number : otherwise;
}

char *fields_text(struct fields fields, unsigned tag, size_t most)
{
    struct field field;
    if (!fields_find(fields, tag, &field)) {
        errno = ENOENT;
        return NULL;
    }
    if (field.length > most || memchr(field.value, 0, field.length)) {
        errno = EINVAL;
        return NULL;
    }
    char *text = malloc(field.length + 1);
    if (!text)
        return NULL;
    memcpy(text, field.value, field.length);
    text[field.length] = 0;
    return text;
}

int fields_path(struct fields fields, unsigned tag, char *path)
{
    struct field name, base;
    if (!fields_find(fields, tag, &name) || !name.length || memchr(name.value, 0, name.length)) {
        errno = EINVAL;
        return -1;
    }
    const char *start = agent.work_dir;
    size_t start_length = strlen(start);
    if (name.value[0] == '/') {
        start_length = 0;
    } else if (fields_find(fields, TAG_CWD, &base)) {
        if (!base.length || base.value[0] != '/' || memchr(base.value, 0, base.length)) {
            errno = EINVAL;
            return -1;
        }
        start = (const char *)base.value;
        start_length = base.length;
    }
    if (start_length + (start_length > 0) + name.length >= PATH_MAX) {
        errno = ENAMETOOLONG;
        return -1;
    }
    memcpy(path, start, start_length);
    if (start_length)
        path[start_length++] = '/';
    memcpy(path + start_length, name.value, name.length);
    path[start_length + name.length] = 0;
    return 0;
}

void add_bytes(struct builder *builder, unsigned tag, const void *value, size_t length)
{
    if (length + 6 > sizeof builder->bytes - builder->length)
        return; /* not reached: callers add only fields that are known to fit */
    uint8_t *at = builder->bytes + builder->length;
    put_u16(at, tag);
    put_u32(at + 2, (uint32_t)length);
    memcpy(at + 6, value, length);
    builder->length += 6 + length;
}

void add_number(struct builder *builder, unsigned tag, uint64_t number)
{
    uint8_t bytes[8];
    put_u64(bytes, number);
    add_bytes(builder, tag, bytes, sizeof bytes);
}
