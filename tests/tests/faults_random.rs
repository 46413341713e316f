//! Random operations while virtual memory calls fail at random, before their effect and after it: the first error is
//! what the caller sees, and nothing is left but what those very failures explain. A failure names its seed.
#![deny(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use cuvmm::ipc::{export, import_from};
use cuvmm::{
    BufferDescriptor, CUresult, Call, Driver, Error, GrowOptions, GrowthPolicy, HandleKind, Options, ResizeError,
    VirtualMemoryBuffer, VirtualMemoryResource,
};
use cuvmm_driver::Hooked;
use cuvmm_sim::Live;
use cuvmm_sim::faults::{Both, Fault, Faults, Ledger, LoggedCall, Random, When};
use cuvmm_tests::{Backend, FAILING, FAILING_CODES, G, allow_open_files};

// What a random call of a real driver leaves can't be told from what others on its machine do.
cuvmm_tests::suite!(@backend strict Strict: random_failures_leave_what_they_explain_and_the_first_is_told);
cuvmm_tests::suite!(@backend measured Measured: random_failures_leave_what_they_explain_and_the_first_is_told);

const RUNS: u64 = 200;
const OPERATIONS: usize = 60;

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
    /// Makes single chunks of the same kind of memory.
    other: VirtualMemoryResource,
    buffers: Vec<VirtualMemoryBuffer>,
    descriptors: Vec<BufferDescriptor>,
}

impl Held {
    fn take(&mut self, numbers: &mut Numbers) -> Option<VirtualMemoryBuffer> {
        let count = self.buffers.len();
        (count > 0).then(|| self.buffers.swap_remove(numbers.below(count)))
    }

    /// Does something with a buffer that stays as it is.
    fn derive(
        &mut self,
        numbers: &mut Numbers,
        operation: impl FnOnce(&VirtualMemoryBuffer, usize) -> Result<VirtualMemoryBuffer, cuvmm::resource::Error>,
    ) -> Result<(), Error> {
        let size = (1 + numbers.below(3)) * G;
        let Some(buffer) = self.take(numbers) else { return Ok(()) };
        let was = (buffer.address(), buffer.size(), buffer.chunks());
        let made = operation(&buffer, size);
        assert_eq!((buffer.address(), buffer.size(), buffer.chunks()), was);
        self.buffers.push(buffer);
        self.keep(made.map_err(Error::from))
    }

    /// Turns a buffer into one of another size.
    fn resize(
        &mut self,
        size: usize,
        buffer: VirtualMemoryBuffer,
        operation: impl FnOnce(VirtualMemoryBuffer, usize) -> Result<VirtualMemoryBuffer, ResizeError>,
    ) -> Result<(), Error> {
        let before = buffer.size();
        match operation(buffer, size) {
            Ok(resized) => self.keep(Ok(resized)),
            Err(error) => {
                let is_resized = error.is_resized();
                let (error, buffer) = error.into_parts();
                assert_eq!(buffer.size(), if is_resized { size } else { before });
                self.buffers.push(buffer);
                Err(error.into())
            }
        }
    }

    fn keep(&mut self, made: Result<VirtualMemoryBuffer, Error>) -> Result<(), Error> {
        self.buffers.push(made?);
        Ok(())
    }

    /// Does something; its error.
    fn operate(&mut self, numbers: &mut Numbers) -> Result<(), Error> {
        let size = (1 + numbers.below(3)) * G;
        match numbers.below(14) {
            0 => {
                let made = self.resource.allocate(size);
                self.keep(made.map_err(Error::from))
            }
            1 => {
                let made = self.resource.allocate_with_capacity(size, size + 8 * G);
                self.keep(made.map_err(Error::from))
            }
            2 => {
                let made = self.resource.allocate_zeroed(G);
                self.keep(made.map_err(Error::from))
            }
            3 => self.derive(numbers, |buffer, extra| buffer.grow(buffer.size() + extra)),
            4 => self.derive(numbers, |buffer, extra| buffer.grow_in_place(buffer.size() + extra)),
            5 => {
                let options = GrowOptions::new().zeroed().chunk_of(&self.other);
                self.derive(numbers, |buffer, _| buffer.grow_with(buffer.size() + G, &options))
            }
            6 => {
                let Some(buffer) = self.take(numbers) else { return Ok(()) };
                self.resize(buffer.size() + size, buffer, VirtualMemoryBuffer::grow_into)
            }
            7 => self.derive(numbers, |buffer, size| buffer.truncate(size.min(buffer.size()))),
            8 | 9 => {
                let Some(buffer) = self.take(numbers) else { return Ok(()) };
                self.resize(numbers.below(buffer.size() / G + 1) * G, buffer, VirtualMemoryBuffer::truncate_into)
            }
            10 => {
                let Some(buffer) = self.take(numbers) else { return Ok(()) };
                buffer.close().map_err(|error| {
                    let (error, buffer) = error.into_parts();
                    assert!(buffer.is_none(), "closed all the same");
                    error.into()
                })
            }
            11 => {
                let Some(buffer) = self.take(numbers) else { return Ok(()) };
                let exported = export(&buffer);
                self.buffers.push(buffer);
                self.descriptors.push(exported?);
                Ok(())
            }
            12 => {
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
fn require_first(told: Result<(), Error>, calls: &[LoggedCall], tries_again: bool, run: &str) {
    // Dropping tells nothing.
    let Err(error) = told else { return };
    let mut failed = calls.iter().filter(|made| FAILING.contains(&made.call) && !made.result.is_success());
    // A place that can't be had, or given back, is no reason not to take another one; nor is memory that is there at the
    // second try, or where less is wished for. What could not be undone of the first try is counted.
    let mut has_tried = false;
    let mut is_overcome = |made: &&LoggedCall| match made.call {
        Call::cuMemAddressReserve | Call::cuMemAddressFree => true,
        Call::cuMemCreate | Call::cuMemSetAccess if tries_again && made.result == CUresult::OUT_OF_MEMORY => {
            has_tried = true;
            true
        }
        Call::cuMemUnmap | Call::cuMemRelease => has_tried,
        _ => false,
    };
    if matches!(error, Error::Resource(cuvmm::resource::Error::WouldMove { .. })) {
        return assert_eq!(failed.find(|made| !is_overcome(made)), None, "{run}: told {error}");
    }
    if error.call().is_none() {
        // What was imported is not exported again.
        return assert_eq!(failed.next(), None, "{run}: told {error}");
    }
    let is_told = |made: &&LoggedCall| (Some(made.call), Some(made.result)) == (error.call(), error.code());
    let first = failed.find(|made| is_told(made) || !is_overcome(made));
    assert!(first.as_ref().is_some_and(is_told), "{run}: told {error}, and the first was {first:?}");
}

fn random_failures_leave_what_they_explain_and_the_first_is_told(backend: &Backend) {
    allow_open_files();
    let (mut fired, mut stranded, mut errors) = (0, 0, 0);
    for seed in 1..=RUNS {
        let run = format!("seed {seed}");
        let simulator = backend.another().simulator.expect("a simulator");
        // The ledger is told what the library is told.
        let (faults, ledger) = (Faults::new(), Ledger::new());
        let hook = Both { outer: ledger.clone(), inner: faults.clone() };
        let driver = Driver::new(Hooked::new(simulator.clone(), hook)).unwrap();
        let device = driver.device(0).unwrap();
        let plain = Options::new().handle_kind(HandleKind::PosixFd);
        let tries_again = seed % 3 == 2;
        let options = match seed % 3 {
            0 => plain.clone(),
            1 => plain.clone().max_chunk(G),
            _ => plain.clone().growth(GrowthPolicy::Step(4 * G)).on_out_of_memory(|_| true),
        };
        let [resource, other] = [options, plain.max_chunk(G)].map(|options| {
            // A first use makes its stream.
            let resource = VirtualMemoryResource::new(&device, options).unwrap();
            resource.allocate_zeroed(G).unwrap().close().unwrap();
            resource
        });

        let mut numbers = Numbers(seed);
        let mut held = Held { resource, other, buffers: Vec::new(), descriptors: Vec::new() };
        faults.fail_at_random(Random::new(seed).per_thousand(60).calls(FAILING).codes(FAILING_CODES));
        for _ in 0..OPERATIONS {
            let before = ledger.total();
            let told = held.operate(&mut numbers);
            errors += usize::from(told.is_err());
            require_first(told, &ledger.log_since(before), tries_again, &run);
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
