#![doc = include_str!("../README.md")]
#![deny(unsafe_code)]

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("cuvmm-sim supports 64-bit Linux alone");

mod access;
mod capture;
mod codes;
mod context;
mod copy;
mod create;
mod device;
mod event;
mod fabric;
pub mod faults;
mod graph;
pub mod kernels;
mod latency;
mod live;
mod machine;
mod map;
mod memory;
mod module;
mod placer;
mod pointer;
mod policy;
mod profiles;
mod raw;
mod reserve;
mod resolve;
mod session;
mod share;
mod simulator;
mod space;
mod state;
mod stepping;
mod stream;
mod thread;
mod user_object;
mod work;

pub use faults::{Faults, Ledger, When};
pub use latency::Latency;
pub use live::{Live, Violation};
pub use machine::{DeviceModel, Granularity, Hints, Machine, NumaNode};
pub use policy::Preset;
pub use simulator::Simulator;
