//! [`LoggedCall`]: a call with its arguments and its result, and the log that keeps the last of them.

use std::collections::VecDeque;
use std::fmt;
use std::thread::ThreadId;

use cuvmm_driver::{CUresult, Call, Invocation};

/// How many lines a log keeps.
const LOGGED: usize = 1 << 18;

/// Adds a line to a log, at the expense of the oldest where there are too many, which is then given back.
pub(crate) fn push_last<T>(log: &mut VecDeque<T>, line: T) -> Option<T> {
    let oldest = if log.len() == LOGGED { log.pop_front() } else { None };
    log.push_back(line);
    oldest
}

/// A call that was made. Shown as a line of C with its result: addresses, handles and pointers in hexadecimal, all
/// else as decimal numbers.
///
/// ```
/// use cuvmm_driver::{Call, Driver, Hooked};
/// use cuvmm_sim::{Ledger, Machine, Simulator};
///
/// let ledger = Ledger::new();
/// let driver = Driver::new(Hooked::new(Simulator::new(Machine::small()), ledger.clone()))?;
/// ledger.clear_calls();
/// let address = driver.mem_address_reserve(2 << 20, 0, Default::default())?;
/// // SAFETY: it was reserved just now; that its size is another is refused.
/// assert!(unsafe { driver.mem_address_free(address, 1 << 20) }.is_err());
///
/// let log = ledger.log();
/// assert_eq!(log[0].call, Call::cuMemAddressReserve);
/// assert_eq!(log[1].to_string(), format!("cuMemAddressFree({:#x}, 1048576) = 1", address.0));
/// # Ok::<(), cuvmm_driver::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoggedCall {
    /// Which call.
    pub call: Call,
    /// Its arguments, as in [`Invocation::arguments`].
    pub arguments: Vec<u64>,
    /// Its result.
    pub result: CUresult,
    /// The thread that made it.
    pub thread: ThreadId,
}

impl fmt::Display for LoggedCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}(", self.call)?;
        for (index, (argument, parameter)) in self.arguments.iter().zip(self.call.parameters()).enumerate() {
            let comma = if index > 0 { ", " } else { "" };
            match parameter.type_name {
                name if is_number(name) => write!(f, "{comma}{}", argument.cast_signed())?,
                "u64" | "usize" => write!(f, "{comma}{argument}")?,
                _ => write!(f, "{comma}{argument:#x}")?,
            }
        }
        write!(f, ") = {}", self.result.0)
    }
}

/// Whether a type is of numbers of up to 32 bits: plain ones, ordinals, and the driver's enumerations.
fn is_number(type_name: &str) -> bool {
    const NUMBERS: [&str; 4] = ["i32", "u8", "u16", "u32"];
    const ENUMERATIONS: [&str; 12] = [
        "CUresult",
        "CUdevice",
        "CUdevice_attribute",
        "CUdevice_P2PAttribute",
        "CUpointer_attribute",
        "CUstream_flags",
        "CUevent_flags",
        "CUstreamCaptureMode",
        "CUmemAllocationHandleType",
        "CUmemAllocationGranularity_flags",
        "CUmemRangeHandleType",
        "CUflushGPUDirectRDMAWritesTarget",
    ];
    NUMBERS.contains(&type_name) || ENUMERATIONS.contains(&type_name) || type_name == "CUflushGPUDirectRDMAWritesScope"
}

/// The last calls. Arguments lie one behind the other, so that a call that is noted allocates nothing.
#[derive(Debug, Default)]
pub(crate) struct Log {
    lines: VecDeque<Line>,
    arguments: VecDeque<u64>,
    /// How many there have been.
    total: usize,
}

#[derive(Debug)]
struct Line {
    call: Call,
    arguments: usize,
    result: CUresult,
    thread: ThreadId,
}

impl Log {
    /// Notes a call, at the expense of the oldest where there are too many.
    pub(crate) fn add(&mut self, invocation: &Invocation<'_>, result: CUresult) {
        let (call, arguments) = (invocation.call, invocation.arguments.len());
        let line = Line { call, arguments, result, thread: std::thread::current().id() };
        if let Some(oldest) = push_last(&mut self.lines, line) {
            self.arguments.drain(..oldest.arguments);
        }
        self.arguments.extend(invocation.arguments);
        self.total += 1;
    }

    /// How many there have been.
    pub(crate) fn total(&self) -> usize {
        self.total
    }

    pub(crate) fn names(&self) -> Vec<Call> {
        self.lines.iter().map(|line| line.call).collect()
    }

    /// All that are kept but the first `earlier` that there have been.
    pub(crate) fn since(&self, earlier: usize) -> Vec<LoggedCall> {
        let dropped = self.total - self.lines.len();
        let skipped = earlier.saturating_sub(dropped).min(self.lines.len());
        let before: usize = self.lines.iter().take(skipped).map(|line| line.arguments).sum();
        let mut arguments = self.arguments.iter().copied().skip(before);
        let call = |line: &Line| LoggedCall {
            call: line.call,
            arguments: arguments.by_ref().take(line.arguments).collect(),
            result: line.result,
            thread: line.thread,
        };
        self.lines.iter().skip(skipped).map(call).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_of_the_list_is_shown_as_what_it_is() {
        let addresses = [
            "CUdeviceptr",
            "CUmemGenericAllocationHandle",
            "CUcontext",
            "CUstream",
            "CUevent",
            "CUgraph",
            "CUgraphNode",
            "CUgraphExec",
            "CUuserObject",
            "CUmodule",
            "CUfunction",
            "CUhostFn",
        ];
        for parameter in Call::ALL.iter().flat_map(|call| call.parameters()) {
            let name = parameter.type_name;
            let kinds =
                [is_number(name), matches!(name, "u64" | "usize"), name.starts_with('*') || addresses.contains(&name)];
            assert_eq!(kinds.iter().filter(|is| **is).count(), 1, "{name}");
        }
    }
}
