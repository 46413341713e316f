//! Every option that a resource and a grow have: what it does, what it refuses, and that it leaves nothing behind.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test stops at what it did not expect")]

#[path = "../support/mod.rs"]
mod support;

mod access;
mod addresses;
mod drivers;
mod features;
mod growth;
mod kinds;
mod on_drop;
mod one_chunk;
mod recycling;
mod resource;
mod shortage;
