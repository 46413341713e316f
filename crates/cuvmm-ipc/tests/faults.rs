//! Every driver call of an export and of an import fails in turn: the error names it, and nothing is left behind.
#![allow(clippy::unwrap_used, clippy::panic, reason = "what a test did not expect ends it, in its helpers too")]

#[path = "support/simulated.rs"]
mod simulated;
mod support;

use std::sync::{Arc, Mutex};
use std::thread;

use cuvmm_driver::{CUresult, Call, Driver, Failure, Hook, Hooked, Invocation};
use cuvmm_ipc::wire::Refusal;
use cuvmm_ipc::{Error, Limits, export, import, import_from, receive_buffer, send_buffer};
use cuvmm_resource::{HandleKind, Options, VirtualMemoryResource};
use cuvmm_sim::{Live, Machine, Simulator};
use simulated::{assert_reads, grown, shareable, write};
use support::{OpenFiles, pair, soon};

/// Lets some calls pass, then fails one.
#[derive(Default)]
struct Fault {
    armed: Mutex<Option<Armed>>,
    hit: Mutex<Option<Call>>,
}

#[derive(Clone, Copy)]
struct Armed {
    passing: usize,
    code: CUresult,
    after: bool,
}

impl Fault {
    fn arm(&self, passing: usize, code: CUresult, after: bool) {
        *self.armed.lock().unwrap() = Some(Armed { passing, code, after });
        *self.hit.lock().unwrap() = None;
    }

    /// The call that was failed, if it came to that.
    fn disarm(&self) -> Option<Call> {
        *self.armed.lock().unwrap() = None;
        self.hit.lock().unwrap().take()
    }

    /// Lets every call pass that `work` makes.
    fn pause(&self, work: impl FnOnce()) {
        let armed = self.armed.lock().unwrap().take();
        work();
        *self.armed.lock().unwrap() = armed;
    }

    fn meet(&self, call: Call, after: bool) -> Option<Failure> {
        // What an error asks for its words.
        if matches!(call, Call::cuGetErrorName | Call::cuGetErrorString) {
            return None;
        }
        let mut armed = self.armed.lock().unwrap();
        let fault = armed.as_mut().filter(|fault| fault.after == after)?;
        if fault.passing > 0 {
            fault.passing -= 1;
            return None;
        }
        let code = fault.code;
        *armed = None;
        *self.hit.lock().unwrap() = Some(call);
        Failure::new(code)
    }
}

impl Hook for Fault {
    fn before(&self, invocation: &Invocation<'_>) -> Option<Failure> {
        self.meet(invocation.call, false)
    }

    fn after(&self, invocation: &Invocation<'_>, _: CUresult) -> Option<Failure> {
        self.meet(invocation.call, true)
    }
}

/// A simulated driver with a fault in front of it.
struct Bench {
    simulator: Simulator,
    driver: Driver,
    fault: Arc<Fault>,
}

impl Bench {
    fn new() -> Self {
        let simulator = Simulator::new(Machine::small().with_imex());
        let fault = Arc::new(Fault::default());
        let driver = Driver::new(Hooked::new(simulator.clone(), Arc::clone(&fault))).unwrap();
        Self { simulator, driver, fault }
    }

    /// Does `work` with its first call failed, then with its second, and so on until it succeeds; gives which calls
    /// were failed. `check` sees each failure.
    fn fail_each<T>(
        &self,
        code: CUresult,
        after: bool,
        work: impl Fn() -> Result<T, Error>,
        check: impl Fn(Call, &Live),
    ) -> Vec<Call> {
        let mut calls = Vec::new();
        loop {
            let live = self.simulator.live();
            self.fault.arm(calls.len(), code, after);
            let result = work();
            match (self.fault.disarm(), result) {
                (None, Ok(_)) => return calls,
                (Some(call), Err(error)) => {
                    assert_eq!((error.call(), error.code()), (Some(call), Some(code)), "{error}");
                    check(call, &live);
                    calls.push(call);
                }
                (Some(call), Ok(_)) => panic!("{call} failed unnoticed"),
                (None, Err(error)) => panic!("{error}"),
            }
        }
    }

    /// That all is as before.
    fn nothing_left(&self) -> impl Fn(Call, &Live) {
        |call, live| {
            assert_eq!(self.simulator.live(), *live, "{call}");
            assert_eq!(self.simulator.violations(), [], "{call}");
        }
    }
}

/// The kinds of handle that memory is shared by.
const KINDS: [HandleKind; 2] = [HandleKind::PosixFd, HandleKind::Fabric];

fn of_kind(driver: &Driver, kind: HandleKind) -> VirtualMemoryResource {
    VirtualMemoryResource::new(&driver.device(0).unwrap(), Options::new().handle_kind(kind)).unwrap()
}

const CODES: [CUresult; 3] = [CUresult::OUT_OF_MEMORY, CUresult::NOT_SUPPORTED, CUresult::UNKNOWN];

#[test]
fn a_failed_export_closes_what_was_exported_before() {
    for kind in KINDS {
        let files = OpenFiles::watch();
        let bench = Bench::new();
        let resource = of_kind(&bench.driver, kind);
        let buffer = grown(&resource, 3);
        write(&buffer, 1);
        // What is found out once is found out here.
        drop(export(&buffer).unwrap());
        let open = OpenFiles::count();
        for code in CODES {
            let nothing_left = bench.nothing_left();
            let calls = bench.fail_each(
                code,
                false,
                || export(&buffer),
                |call, live| {
                    nothing_left(call, live);
                    assert_eq!(OpenFiles::count(), open, "{call}");
                },
            );
            let exports = calls.iter().filter(|call| **call == Call::cuMemExportToShareableHandle).count();
            assert_eq!(exports, 3, "{calls:?}");
        }
        assert_reads(&buffer, 1);
        let larger = buffer.grow(buffer.size() + 1).unwrap();
        larger.close().unwrap();
        assert_reads(&buffer, 1);
        buffer.close().unwrap();
        drop(resource);
        assert_eq!(bench.simulator.live(), Live::default());
        drop(bench);
        files.assert_unchanged();
    }
}

#[test]
fn an_export_that_failed_after_its_effect_loses_one_handle() {
    let _files = OpenFiles::watch();
    let bench = Bench::new();
    let buffer = grown(&shareable(&bench.driver, 0), 3);
    drop(export(&buffer).unwrap());
    let open = OpenFiles::count();
    let unchanged = bench.nothing_left();
    let calls = bench.fail_each(CUresult::UNKNOWN, true, || export(&buffer), unchanged);
    let lost = calls.iter().filter(|call| **call == Call::cuMemExportToShareableHandle).count();
    assert_eq!(lost, 3);
    assert_eq!(OpenFiles::count(), open + lost);
}

#[test]
fn a_failed_import_leaves_nothing() {
    for kind in KINDS {
        let files = OpenFiles::watch();
        let bench = Bench::new();
        let resource = of_kind(&bench.driver, kind);
        let buffer = grown(&resource, 3);
        write(&buffer, 2);
        let descriptor = export(&buffer).unwrap();
        // What is found out once is found out here.
        drop(import_from(&resource, &descriptor).unwrap());
        let open = OpenFiles::count();
        for code in CODES {
            let nothing_left = bench.nothing_left();
            let calls = bench.fail_each(
                code,
                false,
                || {
                    let imported = import_from(&resource, &descriptor)?;
                    bench.fault.pause(|| {
                        assert_reads(&imported, 2);
                        drop(imported);
                    });
                    Ok(())
                },
                |call, live| {
                    nothing_left(call, live);
                    assert_eq!(OpenFiles::count(), open, "{call}");
                },
            );
            for call in [Call::cuMemImportFromShareableHandle, Call::cuMemMap, Call::cuMemSetAccess] {
                assert_eq!(calls.iter().filter(|known| **known == call).count(), 3, "{calls:?}");
            }
        }
        drop((buffer, descriptor, resource));
        assert_eq!(bench.simulator.live(), Live::default());
        drop(bench);
        files.assert_unchanged();
    }
}

#[test]
fn an_import_that_failed_after_its_effect_loses_that_object_alone() {
    let _files = OpenFiles::watch();
    let bench = Bench::new();
    let resource = shareable(&bench.driver, 0);
    let descriptor = export(&grown(&resource, 2)).unwrap();
    drop(import_from(&resource, &descriptor).unwrap());
    let calls = bench.fail_each(
        CUresult::UNKNOWN,
        true,
        || import_from(&resource, &descriptor),
        |call, before| {
            let mut expect = before.clone();
            match call {
                // A reference, and it is an imported one.
                Call::cuMemImportFromShareableHandle => {
                    expect.allocations += 1;
                    expect.imported += 1;
                }
                Call::cuMemAddressReserve => expect.reservations += 1,
                // A range where something may be mapped is kept, and what is mapped there.
                Call::cuMemMap => {
                    expect.mappings += 1;
                    expect.reservations += 1;
                }
                _ => {}
            }
            assert_eq!(bench.simulator.live(), expect, "{call}");
        },
    );
    for call in [Call::cuMemImportFromShareableHandle, Call::cuMemAddressReserve, Call::cuMemMap, Call::cuMemSetAccess]
    {
        assert!(calls.contains(&call), "{calls:?}");
    }
}

#[test]
fn an_import_by_value_that_fails_midway_closes_every_handle() {
    let _files = OpenFiles::watch();
    let bench = Bench::new();
    let resource = shareable(&bench.driver, 0);
    let buffer = grown(&resource, 4);
    drop(import(&resource, export(&buffer).unwrap()).unwrap());
    let (live, open) = (bench.simulator.live(), OpenFiles::count());
    bench.fail_each(
        CUresult::UNKNOWN,
        false,
        || import(&resource, export(&buffer)?),
        |call, _| {
            assert_eq!(OpenFiles::count(), open, "{call}");
            assert_eq!(bench.simulator.live(), live, "{call}");
        },
    );
}

#[test]
fn both_sides_of_an_exchange_hear_of_a_failure_of_either() {
    for kind in KINDS {
        let files = OpenFiles::watch();
        let (exporter, importer) = (Bench::new(), Bench::new());
        let (from, to) = (of_kind(&exporter.driver, kind), of_kind(&importer.driver, kind));
        let buffer = grown(&from, 40);
        let exchange = || {
            let (ours, theirs) = pair();
            thread::scope(|scope| {
                let sender = scope.spawn(|| send_buffer(ours, &buffer, soon()));
                let received = receive_buffer(theirs, &to, &Limits::default(), soon());
                (sender.join().unwrap(), received.map(drop))
            })
        };
        assert!(matches!(exchange(), (Ok(()), Ok(()))));
        let before = (exporter.simulator.live(), importer.simulator.live(), OpenFiles::count());
        let assert_unchanged = || {
            assert_eq!((exporter.simulator.live(), importer.simulator.live(), OpenFiles::count()), before);
        };
        // The calls of an export are one for each chunk.
        for passing in [0, 1, 15, 16, 29, 39] {
            exporter.fault.arm(passing, CUresult::OPERATING_SYSTEM, false);
            let (sent, received) = exchange();
            let (sent, received) = (sent.unwrap_err(), received.unwrap_err());
            assert_eq!(exporter.fault.disarm(), sent.call());
            assert!(matches!(received, Error::Abandoned { chunks: 40, .. }), "{received}");
            assert_unchanged();
        }
        for passing in [0, 5, 60, 100, 160] {
            importer.fault.arm(passing, CUresult::OUT_OF_MEMORY, false);
            let (sent, received) = exchange();
            let (sent, received) = (sent.unwrap_err(), received.unwrap_err());
            assert_eq!(importer.fault.disarm(), received.call());
            assert!(matches!(sent, Error::Refused { reason: Refusal::DRIVER, detail: 2 }), "{sent}");
            assert_unchanged();
        }
        drop((buffer, from, to, exporter, importer));
        files.assert_unchanged();
    }
}
