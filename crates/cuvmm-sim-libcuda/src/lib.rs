#![doc = include_str!("../README.md")]
#![deny(unsafe_code)]

mod beyond;
mod configuration;
mod exports;
mod library;
mod log;
mod per_thread;
mod resolve;
