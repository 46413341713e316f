//! What must hold of a simulated driver, by subject. Rules are asked of both presets where their answers agree.

#![allow(clippy::unwrap_used, reason = "tests")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "tests: each block makes calls of one kind")]

mod access;
mod calls;
mod capture;
mod common;
mod contexts;
mod create;
mod dma_buf;
mod every_call;
mod faults;
mod graphs;
mod kernels;
mod machines;
mod map;
mod reserve;
mod resolve;
mod share;
mod stepping;
mod streams;
#[path = "../support/every_call.rs"]
mod support;
mod user_objects;
