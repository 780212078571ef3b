//! Programs that must not compile, with the compiler's errors. After a review of the changes, `TRYBUILD=overwrite cargo
//! test -p tensorwire-compile-fail` stores the present errors.
//!
//! Each case shows that types prevent one misuse:
//!
//! | misuse | case |
//! | --- | --- |
//! | use a buffer that was posted for a read | `posted_buffer` |
//! | write the source of a write that was posted | `posted_source` |
//! | post a slice, although nothing keeps it alive until the completion | `posted_slice` |
//! | forget an operation | `forgotten_operation` |
//! | form a slice of memory while it is granted | `granted_slice` |
//! | keep the buffer that was granted | `granted_buffer` |
//! | end a grant twice | `grant_ended_twice` |
//! | reach into a region while a peer writes it: only through a counted access | `granted_region` |
//! | keep a counted access for longer than its target | `access_outlives_target` |
//! | write memory that a peer lends | `written_loan` |
//! | wait for an arrival of a queue pair that is gone | `arrival_outlives_queue_pair` |
//! | a runtime that is bound to its thread | `runtime_of_one_thread` |
//! | a task that is bound to its thread | `task_of_one_thread` |
//!
//! Posting two batches at once on one queue pair is no misuse here: posting takes `&self`, and a batch is one request
//! (`write_vectored`); nothing can be posted between its parts. The types of std forbid a waker that is bound to its
//! thread. An example in the documentation of `Recv::into_buffer` shows that a receive takes no borrowed slice.

#[test]
fn s1_what_types_forbid() {
    trybuild::TestCases::new().compile_fail("tests/cases/*.rs");
}
