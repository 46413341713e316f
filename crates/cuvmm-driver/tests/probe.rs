//! Probes: each step failed in turn, nothing left behind, asked once.

mod support;

use std::sync::Arc;
use std::thread;

use cuvmm_driver::sys::{CUmemAllocationHandleType as Kind, CUresult};
use cuvmm_driver::{Call, Device, Driver, Error, Hooked, Probe};
use support::{Fake, Ledger};

struct Machine {
    device: Device,
    other: Device,
    fake: Arc<Fake>,
    ledger: Arc<Ledger>,
}

fn machine() -> Result<Machine, Error> {
    let (fake, ledger) = (Arc::new(Fake::default()), Arc::new(Ledger::default()));
    let driver = Driver::new(Hooked::new(Arc::clone(&fake), Arc::clone(&ledger)))?;
    ledger.take();
    Ok(Machine { device: driver.device(0)?, other: driver.device(1)?, fake, ledger })
}

const STEPS: [Call; 6] = [
    Call::cuMemGetAllocationGranularity,
    Call::cuMemCreate,
    Call::cuMemExportToShareableHandle,
    Call::cuMemImportFromShareableHandle,
    Call::cuMemRelease,
    Call::cuMemRelease,
];

#[test]
fn each_kind_is_made_exported_imported_and_given_back_once() -> Result<(), Error> {
    let machine = machine()?;
    for kind in [Kind::POSIX_FILE_DESCRIPTOR, Kind::FABRIC] {
        assert_eq!(machine.device.probe(kind), Probe::Available);
        assert_eq!(machine.ledger.names(), STEPS);
        assert!(machine.device.probe(kind).is_available());
        assert!(machine.device.driver().device(0)?.probe(kind).is_available(), "another value of the device");
        assert_eq!(machine.ledger.names(), [], "known by now");
    }
    assert_eq!(machine.fake.live(), 0);
    assert!(machine.device.driver().stranded().is_empty());
    Ok(())
}

#[test]
fn each_device_is_probed_by_itself() -> Result<(), Error> {
    let machine = machine()?;
    machine.ledger.fail(Call::cuMemCreate, CUresult::NOT_PERMITTED);
    assert!(!machine.device.probe(Kind::POSIX_FILE_DESCRIPTOR).is_available());
    machine.ledger.heal();
    assert!(machine.other.probe(Kind::POSIX_FILE_DESCRIPTOR).is_available());
    assert!(!machine.device.probe(Kind::POSIX_FILE_DESCRIPTOR).is_available());
    Ok(())
}

#[test]
fn memory_that_is_not_shared_is_only_made() -> Result<(), Error> {
    let machine = machine()?;
    assert_eq!(machine.device.probe(Kind::NONE), Probe::Available);
    assert_eq!(machine.ledger.names(), [Call::cuMemGetAllocationGranularity, Call::cuMemCreate, Call::cuMemRelease]);
    assert_eq!(machine.fake.live(), 0);
    Ok(())
}

#[test]
fn two_kinds_at_once_are_one_allocation() -> Result<(), Error> {
    let machine = machine()?;
    assert_eq!(machine.device.probe(Kind(Kind::POSIX_FILE_DESCRIPTOR.0 | Kind::FABRIC.0)), Probe::Available);
    let names = machine.ledger.names();
    assert_eq!(names.iter().filter(|call| **call == Call::cuMemCreate).count(), 1);
    assert_eq!(names.iter().filter(|call| **call == Call::cuMemExportToShareableHandle).count(), 2);
    assert_eq!(machine.fake.live(), 0);
    Ok(())
}

#[test]
fn a_refusal_names_the_step_and_leaves_nothing_behind() -> Result<(), Error> {
    for kind in [Kind::POSIX_FILE_DESCRIPTOR, Kind::FABRIC] {
        for step in &STEPS[1..4] {
            for code in [CUresult::INVALID_VALUE, CUresult::INVALID_DEVICE, CUresult::NOT_PERMITTED, CUresult::UNKNOWN]
            {
                let machine = machine()?;
                machine.ledger.fail(*step, code);
                let probe = machine.device.probe(kind);
                assert!(
                    matches!(&probe, Probe::Refused { call, error } if call == step && error.code() == Some(code)),
                    "{step} failed with {code}: {probe:?}"
                );
                assert_eq!(machine.fake.live(), 0, "after {step} failed");
                // It is a fact about the machine, and not asked again.
                machine.ledger.heal();
                machine.ledger.take();
                assert_eq!(machine.device.probe(kind), probe);
                assert_eq!(machine.ledger.names(), []);
            }
        }
    }
    Ok(())
}

#[test]
fn what_says_nothing_of_the_kind_is_not_remembered() -> Result<(), Error> {
    for (step, code) in [
        (Call::cuMemCreate, CUresult::OUT_OF_MEMORY),
        (Call::cuMemExportToShareableHandle, CUresult::OPERATING_SYSTEM),
        // Inside a host function every call is refused so, the first one already.
        (Call::cuMemGetAllocationGranularity, CUresult::NOT_PERMITTED),
    ] {
        let machine = machine()?;
        machine.ledger.fail(step, code);
        let probe = machine.device.probe(Kind::POSIX_FILE_DESCRIPTOR);
        assert!(matches!(&probe, Probe::Refused { call, .. } if *call == step), "{probe:?}");
        machine.ledger.heal();
        assert_eq!(machine.device.probe(Kind::POSIX_FILE_DESCRIPTOR), Probe::Available);
        assert_eq!(machine.fake.live(), 0);
    }
    Ok(())
}

/// The driver says no to giving back: the kind is not to be relied on, and what is lost is counted.
#[test]
fn what_can_not_be_given_back_is_counted() -> Result<(), Error> {
    let machine = machine()?;
    machine.ledger.fail(Call::cuMemRelease, CUresult::UNKNOWN);
    let probe = machine.device.probe(Kind::POSIX_FILE_DESCRIPTOR);
    assert!(matches!(&probe, Probe::Refused { call: Call::cuMemRelease, .. }), "{probe:?}");
    assert_eq!(machine.fake.live(), 2, "the one made and the one imported");
    assert_eq!(machine.device.driver().stranded().total(), 2);

    let probe = machine.device.probe(Kind::NONE);
    assert!(matches!(&probe, Probe::Refused { call: Call::cuMemRelease, .. }), "{probe:?}");
    assert_eq!(machine.device.driver().stranded().total(), 3);
    Ok(())
}

/// How many bytes an export of such a kind would write is not known.
#[test]
fn a_kind_that_is_not_known_is_refused_without_a_call() -> Result<(), Error> {
    let machine = machine()?;
    for kind in [Kind::WIN32, Kind::WIN32_KMT, Kind(16), Kind(17), Kind(u32::MAX)] {
        let probe = machine.device.probe(kind);
        assert!(matches!(&probe, Probe::Refused { error: Error::InvalidArgument { .. }, .. }), "{probe:?}");
    }
    assert_eq!(machine.ledger.names(), []);
    Ok(())
}

#[test]
fn eight_threads_that_ask_at_once_probe_once() -> Result<(), Error> {
    let machine = machine()?;
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| assert!(machine.device.probe(Kind::POSIX_FILE_DESCRIPTOR).is_available()));
        }
    });
    assert_eq!(machine.ledger.names(), STEPS);
    Ok(())
}

#[test]
fn what_a_handle_looks_like_is_known_after_the_first_export() -> Result<(), Error> {
    use std::os::unix::fs::MetadataExt;
    let machine = machine()?;
    let kind = Kind::POSIX_FILE_DESCRIPTOR;
    assert_eq!((machine.device.posix_fd_file(), machine.device.probed(kind)), (None, None));
    machine.ledger.fail(Call::cuMemCreate, CUresult::OUT_OF_MEMORY);
    let refused = machine.device.probe(kind);
    assert_eq!((machine.device.posix_fd_file(), machine.device.probed(kind)), (None, Some(refused)));
    // An export is enough: what the driver then makes of its own handle is another matter.
    machine.ledger.heal();
    machine.ledger.fail(Call::cuMemImportFromShareableHandle, CUresult::OUT_OF_MEMORY);
    assert!(!machine.device.probe(kind).is_available());
    let file = machine
        .device
        .posix_fd_file()
        .ok_or(Error::InvalidArgument { call: Call::cuMemExportToShareableHandle, reason: "not seen" })?;
    // Such files the fake driver exports.
    let null = std::fs::metadata("/dev/null").map_err(|_| Error::NoSuchDevice { ordinal: 0, count: 0 })?;
    assert_eq!((file.file_type, file.device), (null.mode() & 0o170_000, null.rdev()));
    machine.ledger.heal();
    assert!(machine.device.probe(kind).is_available());
    assert_eq!(machine.device.probed(kind), Some(Probe::Available));
    machine.ledger.take();
    assert_eq!(machine.device.posix_fd_file(), Some(file));
    assert_eq!(machine.ledger.names(), []);
    assert_eq!(machine.other.posix_fd_file(), None, "each device has its own");
    Ok(())
}

#[test]
fn a_device_is_asked_once_who_it_is() -> Result<(), Error> {
    let machine = machine()?;
    machine.ledger.fail(Call::cuDeviceGetUuid, CUresult::UNKNOWN);
    assert!(machine.device.uuid().is_err());
    machine.ledger.heal();
    machine.ledger.take();
    let uuid = machine.device.uuid()?;
    assert_eq!(machine.device.driver().device(0)?.uuid()?, uuid);
    assert_eq!(machine.ledger.names(), [Call::cuDeviceGetUuid]);
    assert_ne!(machine.other.uuid()?, uuid);
    Ok(())
}
