//! What a person reads: the table of steps, and what to do about a failure.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use anyhow::Context;
use cuvmm::{CUresult, Call, Error, LoadError, Outcome, VirtualMemoryBuffer};

/// Prints a row for each step.
pub(crate) struct Table {
    started: Instant,
}

impl Table {
    pub(crate) fn begin() -> anyhow::Result<Self> {
        columns("step", "outcome", "address", "chunks", "bytes", "time")?;
        Ok(Self { started: Instant::now() })
    }

    /// A table that goes on under the head of another.
    pub(crate) fn resume() -> Self {
        Self { started: Instant::now() }
    }

    /// Starts the time of the next step.
    pub(crate) fn start(&mut self) {
        self.started = Instant::now();
    }

    /// A step that ended with this buffer.
    pub(crate) fn buffer(&self, step: &str, buffer: &VirtualMemoryBuffer) -> anyhow::Result<()> {
        let outcome = match buffer.outcome() {
            Some(Outcome::Covered) => "covered",
            Some(Outcome::InPlace) => "in place",
            Some(Outcome::Moved) => "moved",
            _ => "mapped",
        };
        let (address, chunks) = (buffer.address().to_string(), buffer.chunks().len().to_string());
        self.row(step, outcome, &address, &chunks, buffer.size())
    }

    /// A step that compared bytes.
    pub(crate) fn verified(&self, step: &str, bytes: usize) -> anyhow::Result<()> {
        self.row(step, "verified", "", "", bytes)
    }

    /// Any other step.
    pub(crate) fn plain(&self, step: &str) -> anyhow::Result<()> {
        self.row(step, "done", "", "", 0)
    }

    fn row(&self, step: &str, outcome: &str, address: &str, chunks: &str, bytes: usize) -> anyhow::Result<()> {
        let bytes = if bytes == 0 { String::new() } else { bytes.to_string() };
        columns(step, outcome, address, chunks, &bytes, &words(self.started.elapsed()))
    }
}

fn columns(step: &str, outcome: &str, address: &str, chunks: &str, bytes: &str, time: &str) -> anyhow::Result<()> {
    line(&format!("{step:<34} {outcome:<9} {address:>14} {chunks:>6} {bytes:>12} {time:>10}"))
}

/// Prints a line.
pub(crate) fn line(text: &str) -> anyhow::Result<()> {
    writeln!(io::stdout().lock(), "{text}").context("failed to write to standard output")
}

/// A time as a person reads it.
fn words(time: Duration) -> String {
    let micros = time.as_micros();
    if micros < 10_000 { format!("{micros} us") } else { format!("{} ms", time.as_millis()) }
}

/// Says what failed, why, and what to do about it.
pub(crate) fn failure(error: &anyhow::Error) {
    let mut stderr = io::stderr().lock();
    // There is nowhere left to report a failure of this.
    let _ = writeln!(stderr, "cuvmm: {error:#}");
    if let Some(advice) = error.chain().find_map(|cause| cause.downcast_ref::<Error>().and_then(advice)) {
        let _ = writeln!(stderr, "{advice}");
    }
}

fn advice(error: &Error) -> Option<&'static str> {
    use cuvmm::resource::Error as Resource;
    match error {
        Error::Load(LoadError::LibraryNotFound { .. }) => {
            return Some("install NVIDIA's driver, or use `--driver sim`, which needs no GPU");
        }
        Error::Load(LoadError::MissingSymbol { .. }) => {
            return Some("update NVIDIA's driver: CUDA 11.0 (branch 450) is the least, and sharing needs 11.4 (470)");
        }
        Error::Driver(cuvmm::driver::Error::NoSuchDevice { .. }) => {
            return Some(
                "the driver shows no GPU to this process: look at CUDA_VISIBLE_DEVICES, or use `--driver sim`",
            );
        }
        Error::Resource(Resource::Unsupported { .. }) => {
            return Some(
                "this GPU, or the system that it is passed to, lacks what the demo shows: `--driver sim` has it",
            );
        }
        _ => {}
    }
    match (error.code()?, error.call()) {
        (CUresult::OUT_OF_MEMORY, Some(Call::cuMemAddressReserve)) => {
            Some("this process has no addresses left: look at its limits (`ulimit -v`)")
        }
        (CUresult::OUT_OF_MEMORY, _) => {
            Some("the demo needs 192 MiB of the GPU's memory and a context: free some, or use `--driver sim`")
        }
        (CUresult::NO_DEVICE, _) => Some("there is a driver and no GPU that it can use: `--driver sim` needs none"),
        (CUresult::NOT_SUPPORTED | CUresult::NOT_PERMITTED, Some(call)) if is_sharing(call) => {
            Some("this machine does not let GPU memory be shared between processes")
        }
        (CUresult::SYSTEM_NOT_READY, _) => Some("the fabric manager of this host is not running"),
        (CUresult::SYSTEM_DRIVER_MISMATCH, _) => Some("the driver was updated and not reloaded: restart the machine"),
        _ => None,
    }
}

fn is_sharing(call: Call) -> bool {
    matches!(call, Call::cuMemExportToShareableHandle | Call::cuMemImportFromShareableHandle)
}
