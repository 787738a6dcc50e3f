/* SPDX-License-Identifier: BSD-3-Clause */
#include "trust.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static bool component_is_safe(const char *path, uid_t other, const char **why)
{
    struct stat info;
    if (lstat(path, &info) != 0) {
        *why = "it cannot be examined";
        return false;
    }
    if (info.st_uid != 0 && info.st_uid != other) {
        *why = "it or a folder above it belongs to another user";
        return false;
    }
    bool writable = (info.st_mode & (S_IWGRP | S_IWOTH)) != 0;
    /* In a sticky folder (/tmp) others cannot rename what is not theirs. */
    if (writable && !(S_ISDIR(info.st_mode) && (info.st_mode & S_ISVTX) != 0)) {
        *why = "it or a folder above it can be written by others";
        return false;
    }
    return true;
}

bool trust_resolve(const char *path, uid_t other, char resolved[PATH_MAX], const char **why)
{
    *why = "it does not exist";
    if (path[0] != '/') {
        *why = "it is not an absolute path";
        return false;
    }
    if (realpath(path, resolved) == NULL)
        return false;
    char prefix[PATH_MAX];
    size_t length = strlen(resolved);
    if (!component_is_safe("/", other, why))
        return false;
    for (size_t i = 1; i <= length; i++) {
        if (resolved[i] != '/' && resolved[i] != '\0')
            continue;
        memcpy(prefix, resolved, i);
        prefix[i] = '\0';
        if (!component_is_safe(prefix, other, why))
            return false;
    }
    return true;
}
