/* SPDX-License-Identifier: BSD-3-Clause */
#include "check.h"
#include "json.h"

#include <math.h>

static struct json json;

static const char *string(const char *bytes, size_t length)
{
    json_begin(&json, "e");
    json_string_n(&json, "k", bytes, length);
    CHECK(json_finish(&json));
    return json.text;
}

static void escapes(void)
{
    CHECK_STRING(string("plain", 5), "{\"event\":\"e\",\"k\":\"plain\"}\n");
    CHECK_STRING(string("a\"b\\c", 5), "{\"event\":\"e\",\"k\":\"a\\\"b\\\\c\"}\n");
    CHECK_STRING(string("\n\x01\x7f", 3), "{\"event\":\"e\",\"k\":\"\\u000a\\u0001\\u007f\"}\n");
    CHECK_STRING(string("\0x", 2), "{\"event\":\"e\",\"k\":\"\\u0000x\"}\n");
    CHECK_STRING(string("\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80", 9),
                 "{\"event\":\"e\",\"k\":\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\"}\n");
#define REPLACED "\xef\xbf\xbd"
    CHECK_STRING(string("\xff", 1), "{\"event\":\"e\",\"k\":\"" REPLACED "\"}\n");
    CHECK_STRING(string("\xc3", 1), "{\"event\":\"e\",\"k\":\"" REPLACED "\"}\n");       /* cut */
    CHECK_STRING(string("\xc0\x80", 2), "{\"event\":\"e\",\"k\":\"" REPLACED REPLACED "\"}\n");
    CHECK_STRING(string("\xe0\x80\x80", 3),                                              /* long */
                 "{\"event\":\"e\",\"k\":\"" REPLACED REPLACED REPLACED "\"}\n");
    CHECK_STRING(string("\xed\xa0\x80", 3),                                              /* half */
                 "{\"event\":\"e\",\"k\":\"" REPLACED REPLACED REPLACED "\"}\n");
    CHECK_STRING(string("\xf4\x90\x80\x80", 4),                                          /* high */
                 "{\"event\":\"e\",\"k\":\"" REPLACED REPLACED REPLACED REPLACED "\"}\n");
}

static void texts(void)
{
    char *full = malloc(3); /* without an end: AddressSanitizer sees every step beyond it */
    CHECK(full != NULL);
    memcpy(full, "abc", 3);
    json_begin(&json, "e");
    json_text(&json, "full", full, 3);
    json_text(&json, "short", "de", 8);
    json_text(&json, "empty", "", 8);
    CHECK(json_finish(&json));
    CHECK_STRING(json.text, "{\"event\":\"e\",\"full\":\"abc\",\"short\":\"de\",\"empty\":null}\n");
    free(full);
}

static void values(void)
{
    json_begin(&json, "e");
    json_int(&json, "i", INT64_MIN);
    json_real(&json, "r", 0.5);
    json_real(&json, "nan", NAN);
    json_bool(&json, "t", true);
    json_null(&json, "n");
    json_string(&json, "s", NULL);
    json_open(&json, "a", '[');
    json_open(&json, NULL, '{');
    json_close(&json);
    json_open(&json, NULL, '{');
    json_int(&json, "x", 1);
    json_close(&json);
    json_int(&json, NULL, 2);
    CHECK(json_finish(&json)); /* closes what is open */
    CHECK_STRING(json.text, "{\"event\":\"e\",\"i\":-9223372036854775808,\"r\":0.500000,\"nan\":null,"
                            "\"t\":true,\"n\":null,\"s\":null,\"a\":[{},{\"x\":1},2]}\n");
}

static void bounds(void)
{
    /* Whatever is put in, the buffer holds, and what does not fit is not sent as if it did. */
    for (int times = 0; times < 3; times++) {
        json_begin(&json, "e");
        for (int i = 0; i < JSON_CAPACITY / 8; i++)
            json_string(&json, "key", "\x01\x02\xff");
        CHECK(!json_finish(&json));
        CHECK(json.length < JSON_CAPACITY);
    }
    json_begin(&json, "e");
    for (int i = 0; i < 100; i++)
        json_open(&json, NULL, '[');
    CHECK(!json_finish(&json));
    json_close(&json);
    json_close(&json);
}

static void any_bytes(void)
{
    uint64_t state = 362436069;
    for (int i = 0; i < 20000; i++) {
        size_t length = check_random(&state) % 64;
        char *bytes = malloc(length + 1);
        CHECK(bytes != NULL);
        for (size_t k = 0; k < length; k++)
            bytes[k] = (char)check_random(&state);
        const char *text = string(bytes, length);
        for (const unsigned char *c = (const unsigned char *)text; c[1] != '\0'; c++)
            CHECK(*c >= 0x20 && *c != 0x7f);
        free(bytes);
    }
}

int main(void)
{
    escapes();
    texts();
    values();
    bounds();
    any_bytes();
    return 0;
}
