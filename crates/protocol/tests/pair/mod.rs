//! Pairs of connections, moved by hand.

mod cancel;
mod eager;
mod failure;
mod flow;
mod fuzzed;
mod known;
mod load;
mod looking;
mod mailbox;
mod misbehaviour;
mod notes;
mod pages;
mod refusals;
mod rules;
mod sequences;
mod several;
mod short;
mod stash;
mod subscription;
mod unpolled;
mod validation;
mod version;
mod view;
