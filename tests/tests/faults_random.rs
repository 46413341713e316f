//! Random operations while virtual memory calls fail at random, before their effect and after it: the first error is
//! what the caller sees, and nothing is left but what those very failures explain. A failure names its seed.
#![deny(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use cuvmm::ipc::{export, import_from};
use cuvmm::{
    BufferDescriptor, CUresult, Call, Driver, Error, HandleKind, Options, VirtualMemoryBuffer, VirtualMemoryResource,
};
use cuvmm_driver::Hooked;
use cuvmm_sim::Live;
use cuvmm_sim::faults::{Both, Fault, Faults, Ledger, LoggedCall, Random, When};
use cuvmm_tests::{Backend, G};

// What a random call of a real driver leaves can't be told from what others on its machine do.
cuvmm_tests::suite!(@backend strict Strict: random_failures_leave_what_they_explain_and_the_first_is_told);
cuvmm_tests::suite!(@backend measured Measured: random_failures_leave_what_they_explain_and_the_first_is_told);

const RUNS: u64 = 200;
const OPERATIONS: usize = 60;

/// The calls that make or undo something, or give access to it.
const FAILING: [Call; 9] = [
    Call::cuMemAddressReserve,
    Call::cuMemAddressFree,
    Call::cuMemCreate,
    Call::cuMemRelease,
    Call::cuMemMap,
    Call::cuMemUnmap,
    Call::cuMemSetAccess,
    Call::cuMemExportToShareableHandle,
    Call::cuMemImportFromShareableHandle,
];

const CODES: [CUresult; 4] =
    [CUresult::INVALID_VALUE, CUresult::OUT_OF_MEMORY, CUresult::NOT_SUPPORTED, CUresult::UNKNOWN];

/// Numbers that look random, by a seed.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % limit
    }
}

/// What there is to operate on.
struct Held {
    resource: VirtualMemoryResource,
    buffers: Vec<VirtualMemoryBuffer>,
    descriptors: Vec<BufferDescriptor>,
}

impl Held {
    fn take(&mut self, numbers: &mut Numbers) -> Option<VirtualMemoryBuffer> {
        let count = self.buffers.len();
        (count > 0).then(|| self.buffers.swap_remove(numbers.below(count)))
    }

    fn keep(&mut self, made: Result<VirtualMemoryBuffer, Error>) -> Result<(), Error> {
        self.buffers.push(made?);
        Ok(())
    }

    /// Does something; its error.
    fn operate(&mut self, numbers: &mut Numbers) -> Result<(), Error> {
        let size = (1 + numbers.below(3)) * G;
        match numbers.below(8) {
            0 => {
                let made = self.resource.allocate(size);
                self.keep(made.map_err(Error::from))
            }
            1 => {
                let made = self.resource.allocate_with_capacity(size, size + 8 * G);
                self.keep(made.map_err(Error::from))
            }
            2 => {
                let Some(buffer) = self.take(numbers) else { return Ok(()) };
                let grown = buffer.grow(buffer.size() + size);
                self.buffers.push(buffer);
                self.keep(grown.map_err(Error::from))
            }
            3 => {
                let Some(buffer) = self.take(numbers) else { return Ok(()) };
                let before = buffer.size();
                match buffer.grow_into(before + size) {
                    Ok(grown) => self.keep(Ok(grown)),
                    Err(error) => {
                        let is_grown = error.is_resized();
                        let (error, buffer) = error.into_parts();
                        assert_eq!(buffer.size(), if is_grown { before + size } else { before });
                        self.buffers.push(buffer);
                        Err(error.into())
                    }
                }
            }
            4 => {
                let Some(buffer) = self.take(numbers) else { return Ok(()) };
                buffer.close().map_err(|error| {
                    let (error, buffer) = error.into_parts();
                    assert!(buffer.is_none(), "closed all the same");
                    error.into()
                })
            }
            5 => {
                let Some(buffer) = self.take(numbers) else { return Ok(()) };
                let exported = export(&buffer);
                self.buffers.push(buffer);
                self.descriptors.push(exported?);
                Ok(())
            }
            6 => {
                let Some(descriptor) = self.descriptors.last() else { return Ok(()) };
                let made = import_from(&self.resource, descriptor);
                self.keep(made.map_err(Error::from))
            }
            _ => {
                // Only so many stay alive.
                self.buffers.truncate(6);
                self.descriptors.truncate(2);
                Ok(())
            }
        }
    }
}

/// Demands that an operation told the first failure in it that it could not do without. Where a mapping was made, and
/// lost, that can be the driver's own.
fn require_first(told: Result<(), Error>, calls: &[LoggedCall], run: &str) {
    // Dropping tells nothing.
    let Err(error) = told else { return };
    let mut failed = calls.iter().filter(|made| FAILING.contains(&made.call) && !made.result.is_success());
    if error.call().is_none() {
        // What was imported is not exported again.
        return assert_eq!(failed.next(), None, "{run}: told {error}");
    }
    let is_told = |made: &&LoggedCall| (Some(made.call), Some(made.result)) == (error.call(), error.code());
    // A place that can't be had, or given back, is no reason not to take another one.
    let place = |made: &&LoggedCall| matches!(made.call, Call::cuMemAddressReserve | Call::cuMemAddressFree);
    let first = failed.find(|made| is_told(made) || !place(made));
    assert!(first.as_ref().is_some_and(is_told), "{run}: told {error}, and the first was {first:?}");
}

fn random_failures_leave_what_they_explain_and_the_first_is_told(backend: &Backend) {
    let (mut fired, mut stranded, mut errors) = (0, 0, 0);
    for seed in 1..=RUNS {
        let run = format!("seed {seed}");
        let simulator = backend.another().simulator.expect("a simulator");
        // The ledger is told what the library is told.
        let (faults, ledger) = (Faults::new(), Ledger::new());
        let hook = Both { outer: ledger.clone(), inner: faults.clone() };
        let driver = Driver::new(Hooked::new(simulator.clone(), hook)).unwrap();
        let options = Options::new().handle_kind(HandleKind::PosixFd);
        let resource = VirtualMemoryResource::new(&driver.device(0).unwrap(), options).unwrap();

        let mut numbers = Numbers(seed);
        let mut held = Held { resource, buffers: Vec::new(), descriptors: Vec::new() };
        faults.fail_at_random(Random::new(seed).per_thousand(60).calls(FAILING).codes(CODES));
        for _ in 0..OPERATIONS {
            let before = ledger.total();
            let told = held.operate(&mut numbers);
            errors += usize::from(told.is_err());
            require_first(told, &ledger.log_since(before), &run);
        }
        drop(held);
        let left = driver.stranded().total();
        require_explained(&simulator.live(), left, &faults.faults(), &run);
        assert_eq!(simulator.violations(), [], "{run}");
        fired += faults.fired();
        stranded += left;
    }
    assert!(fired > 1000 && errors > 500 && stranded > 100, "{fired} failures, {errors} told, {stranded} stranded");
}

/// Demands that what is alive and what is stranded are what the failures left, no more and no less.
fn require_explained(live: &Live, stranded: usize, faults: &[Fault], run: &str) {
    let count = |calls: &[Call], when: When| {
        faults.iter().filter(|fault| fault.when == when && calls.contains(&fault.call)).count()
    };
    // Made, and lost; or not given back.
    let lost = |makes: &[Call], undoes: &[Call]| count(makes, When::After) + count(undoes, When::Before);
    let story = || format!("{run}: {live:?}, {stranded} stranded, after {faults:?}");
    assert_eq!(live.mappings, lost(&[Call::cuMemMap], &[Call::cuMemUnmap]), "{}", story());
    let makes = [Call::cuMemCreate, Call::cuMemImportFromShareableHandle];
    assert_eq!(live.allocations, lost(&makes, &[Call::cuMemRelease]), "{}", story());
    // The addresses around what is mapped, or is taken for that, stay too.
    let reservations = lost(&[Call::cuMemAddressReserve], &[Call::cuMemAddressFree]);
    let around = live.mappings + count(&[Call::cuMemUnmap], When::After);
    assert!((reservations..=reservations + around).contains(&live.reservations), "{}", story());
    // Each failure to give back is counted, and so are addresses that a lost mapping keeps from being freed.
    let undoes = [Call::cuMemUnmap, Call::cuMemRelease, Call::cuMemAddressFree];
    let failed = count(&undoes, When::Before) + count(&undoes, When::After);
    let kept = count(&[Call::cuMemMap], When::After);
    assert!((failed..=failed + kept).contains(&stranded), "{}", story());
}
