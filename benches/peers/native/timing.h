/* The timing loop of the rivals in C and C++; the same as in src/plan.rs. */
#ifndef TIMING_H
#define TIMING_H

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static inline double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Ends the process with a message. */
static inline void fail(const char *what) {
    fprintf(stderr, "%s\n", what);
    exit(1);
}

/* Times `operation`, one at a time, after a warm-up that also finds out how many operations fill the time; prints operations and
   seconds. The clock is read at the start and at the finish only. */
static inline void time_and_print(void (*operation)(void), double length) {
    double rate = 0;
    for (int warm_up = 0; warm_up < 2; warm_up++) {
        double begin = seconds_now();
        long done = 0;
        while (done < 2 || seconds_now() - begin < length / 8) {
            operation();
            done++;
        }
        rate = (double)done / (seconds_now() - begin);
    }
    double wanted = rate * length;
    long operations = wanted < 4 ? 4 : wanted > 1e9 ? 1000000000 : (long)wanted;
    double begin = seconds_now();
    for (long done = 0; done < operations; done++) {
        operation();
    }
    printf("%ld %.9f\n", operations, seconds_now() - begin);
    fflush(stdout);
}

/* Like `time_and_print`, for an operation of all processes together: `first_says` gives every process the number of the first.
   Each process executes as many operations, and the first one prints. */
static inline void time_together(void (*operation)(void), long (*first_says)(long), int is_first, double length) {
    long operations = 2;
    double spent = 0;
    for (long is_enough = 0; !is_enough; operations *= is_enough ? 1 : 2) {
        double begin = seconds_now();
        for (long done = 0; done < operations; done++) {
            operation();
        }
        spent = seconds_now() - begin;
        is_enough = first_says(spent > length / 8);
    }
    double wanted = (double)operations / spent * length;
    operations = first_says(wanted < 4 ? 4 : (long)wanted);
    double begin = seconds_now();
    for (long done = 0; done < operations; done++) {
        operation();
    }
    if (is_first) {
        printf("%ld %.9f\n", operations, seconds_now() - begin);
        fflush(stdout);
    }
}

#endif
