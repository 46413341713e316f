//! The decorator: what it sees, and that it only ever turns results into failures.
//!
//! # Safety
//! Outputs are ours; handles are those of the driver in `support`.
#![allow(unsafe_code)]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cuvmm_driver::sys::*;
use cuvmm_driver::{Call, Driver, Error, Failure, Hook, Hooked, Invocation, RawDriver};
use support::{Fake, Ledger};

fn driver() -> Result<(Driver, Arc<Fake>, Arc<Ledger>), Error> {
    let (fake, ledger) = (Arc::new(Fake::default()), Arc::new(Ledger::default()));
    let driver = Driver::new(Hooked::new(Arc::clone(&fake), Arc::clone(&ledger)))?;
    Ok((driver, fake, ledger))
}

#[test]
fn each_call_is_seen_with_the_bits_of_its_arguments() -> Result<(), Error> {
    let (driver, _, ledger) = driver()?;
    let start = ledger.names();
    use Call::{cuDeviceGet, cuDeviceGetCount, cuDriverGetVersion, cuInit};
    assert_eq!(start, [cuInit, cuDriverGetVersion, cuDeviceGetCount, cuDeviceGet, cuDeviceGet]);

    let _reserved = driver.mem_address_reserve(4 << 20, 2 << 20, CUdeviceptr(0x7000_0000))?;
    let seen = ledger.take();
    assert_eq!(seen.len(), 1);
    let (call, arguments) = &seen[0];
    assert_eq!(*call, Call::cuMemAddressReserve);
    assert_eq!(arguments[1..], [4 << 20, 2 << 20, 0x7000_0000, 0], "the first is where the address is written");
    assert_ne!(arguments[0], 0);
    assert_eq!(ledger.made(), 6);
    Ok(())
}

#[test]
fn a_negative_number_keeps_its_bits() -> Result<(), Error> {
    let (driver, _, ledger) = driver()?;
    ledger.take();
    let mut device = CUdevice::default();
    // SAFETY: the output is ours.
    let code = unsafe { driver.raw().cuDeviceGet(&raw mut device, -1) };
    assert_eq!(code, CUresult::SUCCESS);
    assert_eq!(ledger.take()[0].1[1], (-1_i64) as u64);
    Ok(())
}

#[test]
fn a_failure_before_keeps_the_call_from_the_driver() -> Result<(), Error> {
    let (driver, fake, ledger) = driver()?;
    ledger.fail(Call::cuMemCreate, CUresult::OUT_OF_MEMORY);
    let made = ledger.made();
    let error = driver.mem_create(2 << 20, &CUmemAllocationProp::default()).err();
    assert_eq!(error.as_ref().and_then(Error::code), Some(CUresult::OUT_OF_MEMORY));
    assert_eq!(fake.live(), 0, "the driver made nothing");
    // Only the two questions after the failure's name and text were passed on.
    assert_eq!(ledger.made(), made + 2);
    Ok(())
}

/// Fails create after it took place, and tries to make a failed release good.
struct Meddler(AtomicBool);

impl Hook for Meddler {
    fn after(&self, invocation: &Invocation<'_>, result: CUresult) -> Option<Failure> {
        match invocation.call {
            Call::cuMemCreate => Failure::new(CUresult::OUT_OF_MEMORY),
            Call::cuMemRelease => {
                self.0.store(result == CUresult::INVALID_VALUE, Ordering::Relaxed);
                Failure::new(CUresult::SUCCESS)
            }
            _ => None,
        }
    }
}

#[test]
fn a_failure_after_is_seen_by_the_caller_alone() -> Result<(), Error> {
    let fake = Arc::new(Fake::default());
    let driver = Driver::new(Hooked::new(Arc::clone(&fake), Meddler(AtomicBool::new(false))))?;
    let error = driver.mem_create(2 << 20, &CUmemAllocationProp::default()).err();
    assert_eq!(error.as_ref().and_then(Error::code), Some(CUresult::OUT_OF_MEMORY));
    assert_eq!(fake.live(), 1, "the driver did make it");
    Ok(())
}

#[test]
fn a_failure_never_becomes_a_success() {
    assert_eq!(Failure::new(CUresult::SUCCESS), None);
    assert_eq!(Failure::new(CUresult::UNKNOWN).map(Failure::code), Some(CUresult::UNKNOWN));
    let hooked = Hooked::new(Fake::default(), Meddler(AtomicBool::new(false)));
    // SAFETY: the fake driver refuses handles that it doesn't know.
    let code = unsafe { hooked.cuMemRelease(CUmemGenericAllocationHandle(99)) };
    assert!(hooked.hook().0.load(Ordering::Relaxed), "the hook saw the failure");
    assert_eq!(code, CUresult::INVALID_VALUE);
}

/// Lacks user objects.
struct Older;

// SAFETY: it answers nothing at all.
unsafe impl RawDriver for Older {
    fn provides(&self, call: Call) -> bool {
        call != Call::cuUserObjectCreate
    }
}

#[test]
fn what_the_driver_provides_passes_through() {
    let hooked = Hooked::new(Arc::new(Older), Ledger::default());
    assert!(!hooked.provides(Call::cuUserObjectCreate));
    assert!(hooked.provides(Call::cuMemCreate));
}
