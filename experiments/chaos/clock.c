/* Sets the time of day forward, for the processes that preload this library.

   A file of eight bytes, which the environment names, has the seconds to add.
   Durations (the monotonic clock) and the times of files stay as they are.
   Until the file says otherwise, calls do what they do without this library:

     cc -shared -fPIC -o clock.so clock.c
     CHAOS_CLOCK=FILE LD_PRELOAD=./clock.so ...

   A wait until a time of day asks the kernel, whose clock was not set, and so
   the seconds are taken off its argument again. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* Times of the monotonic clock, which some waits have, are smaller. */
#define LEAST_TIME_OF_DAY 1000000000

static const int64_t none = 0;
static const volatile int64_t *ahead = &none;

__attribute__((constructor)) static void open_file(void) {
  const char *path = getenv("CHAOS_CLOCK");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return;
  void *bytes = mmap(NULL, sizeof *ahead, PROT_READ, MAP_SHARED, file, 0);
  if (bytes != MAP_FAILED) ahead = bytes;
  close(file);
}

/* The kernel's time for a time of this library. */
static const struct timespec *kernel(const struct timespec *time,
                                     struct timespec *result) {
  if (!time || time->tv_sec < LEAST_TIME_OF_DAY) return time;
  *result = *time;
  result->tv_sec -= *ahead;
  return result;
}

static long (*next_syscall(void))(long, ...) {
  static long (*found)(long, ...);
  if (!found) found = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
  return found;
}

int clock_gettime(clockid_t clock, struct timespec *time) {
  static int (*found)(clockid_t, struct timespec *);
  if (!found)
    found = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT,
                                                         "clock_gettime");
  int result = found(clock, time);
  if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
    time->tv_sec += *ahead;
  return result;
}

int gettimeofday(struct timeval *restrict time, void *restrict zone) {
  struct timespec now;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &now);
  time->tv_sec = now.tv_sec;
  time->tv_usec = now.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *result) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (result) *result = now.tv_sec;
  return now.tv_sec;
}

int timespec_get(struct timespec *time, int base) {
  clock_gettime(CLOCK_REALTIME, time);
  return base;
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *until,
                    struct timespec *left) {
  struct timespec other;
  if (flags & TIMER_ABSTIME) until = kernel(until, &other);
  return next_syscall()(SYS_clock_nanosleep, clock, flags, until, left) ? errno
                                                                        : 0;
}

int sem_timedwait(sem_t *restrict semaphore,
                  const struct timespec *restrict until) {
  struct timespec other;
  return sem_clockwait(semaphore, CLOCK_REALTIME, kernel(until, &other));
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition,
                           pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
  static int (*found)(pthread_cond_t *, pthread_mutex_t *,
                      const struct timespec *);
  struct timespec other;
  /* The older version of the name has conditions of another layout. */
  if (!found)
    found = (int (*)(pthread_cond_t *, pthread_mutex_t *,
                     const struct timespec *))dlvsym(RTLD_NEXT,
                                                     "pthread_cond_timedwait",
                                                     "GLIBC_2.3.2");
  if (!found) /* Other processors have one version only. */
    found = (int (*)(pthread_cond_t *, pthread_mutex_t *,
                     const struct timespec *))dlsym(RTLD_NEXT,
                                                    "pthread_cond_timedwait");
  return found(condition, mutex, kernel(until, &other));
}

int pthread_cond_clockwait(pthread_cond_t *condition, pthread_mutex_t *mutex,
                           clockid_t clock, const struct timespec *until) {
  static int (*found)(pthread_cond_t *, pthread_mutex_t *, clockid_t,
                      const struct timespec *);
  struct timespec other;
  if (!found)
    found = (int (*)(pthread_cond_t *, pthread_mutex_t *, clockid_t,
                     const struct timespec *))dlsym(RTLD_NEXT,
                                                    "pthread_cond_clockwait");
  return found(condition, mutex, clock, kernel(until, &other));
}

/* Abseil, which Ray's gRPC waits by, calls futex by its number. */
long syscall(long number, ...) {
  long word[6];
  va_list rest;
  struct timespec other;
  va_start(rest, number);
  for (int i = 0; i < 6; ++i) word[i] = va_arg(rest, long);
  va_end(rest);
  if (number == SYS_futex && word[1] & FUTEX_CLOCK_REALTIME)
    word[3] = (long)kernel((const struct timespec *)word[3], &other);
  return next_syscall()(number, word[0], word[1], word[2], word[3], word[4],
                        word[5]);
}
