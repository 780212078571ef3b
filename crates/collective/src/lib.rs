//! Groups of workers and their collectives.
//!
//! A group is a number of workers, its ranks, that call the same collectives in the same order. Ranks find each other through a
//! [`Store`](store::Store); after that the store carries nothing until the membership changes.
//!
//! | module | what it decides |
//! | --- | --- |
//! | [`store`] | where ranks write their addresses, and read those of the others |
//! | [`launch`] | which rank this process is, by the variables of the program that started it |
//! | [`reduction`] | how elements are combined |
//! | [`schedule`] | who sends which part of a value to whom, and when |

#![forbid(unsafe_code)]

pub mod launch;
pub mod reduction;
pub mod schedule;
pub mod store;
