//! The environment says which machine there is; each test's library is loaded in a process of its own.

use cuvmm_driver::sys::{CUdevice_attribute, CUdeviceptr, CUmemGenericAllocationHandle};
use cuvmm_driver::{CUresult, Call, CudaVersion, Driver, LoadError};

use crate::round_trip::{UNIT, make, release, start};
use crate::stand_in::{Folder, alone, load};

/// As any program finds it, also where there is a real one.
#[test]
fn our_loader_takes_it_by_the_drivers_name_from_where_the_process_looks_first() {
    let folder = Folder::new();
    let test = "environment::our_loader_takes_it_by_the_drivers_name_from_where_the_process_looks_first";
    alone(test, &[("LD_LIBRARY_PATH", folder.path())], || {
        let driver = Driver::load().unwrap();
        assert_eq!(driver.device(0).unwrap().name().unwrap(), "Simulated H200");
    });
}

#[test]
fn the_machine_and_what_the_process_sees_of_it() {
    let environment =
        [("CUVMM_SIM_MACHINE", "h200_pair"), ("CUVMM_SIM_ATTRIBUTES", "115=0"), ("CUDA_VISIBLE_DEVICES", "1")];
    alone("environment::the_machine_and_what_the_process_sees_of_it", &environment, || {
        let driver = load().unwrap();
        assert_eq!(driver.device_count(), 1);
        let device = driver.device(0).unwrap();
        assert_eq!(device.uuid().unwrap().bytes[15], 1);
        assert_eq!(device.attribute(CUdevice_attribute(115)).unwrap(), Some(0));
    });
}

/// Symbols are there whatever the version; what they answer, and what cuGetProcAddress finds, goes by it.
#[test]
fn the_drivers_version_hides_later_calls() {
    let environment = [("CUVMM_SIM_DRIVER_VERSION", "11020")];
    alone("environment::the_drivers_version_hides_later_calls", &environment, || {
        let driver = load().unwrap();
        assert_eq!(driver.version(), CudaVersion(11020));
        assert!(driver.raw().provides(Call::cuMemRetainAllocationHandle), "of 11.0");
        for later in [Call::cuMemGetHandleForAddressRange, Call::cuUserObjectCreate, Call::cuStreamGetDevice] {
            assert!(!driver.raw().provides(later), "{later}");
        }
    });
}

#[test]
fn a_wrong_value_is_said_once_and_leaves_no_device() {
    let said =
        alone("environment::a_wrong_value_is_said_once_and_leaves_no_device", &[("CUVMM_SIM_MACHINE", "h300")], || {
            for _ in 0..2 {
                match load().unwrap_err() {
                    LoadError::Init(error) => assert_eq!(error.code(), Some(CUresult(100))),
                    error => panic!("{error:?}"),
                }
            }
        });
    if let Some(said) = said {
        assert_eq!(said, "cuvmm-sim: CUVMM_SIM_MACHINE cannot be \"h300\"; there are no devices\n");
    }
}

#[test]
fn violations_and_what_is_left_are_told_at_the_end() {
    let test = "environment::violations_and_what_is_left_are_told_at_the_end";
    let said = alone(test, &[("CUVMM_SIM_LOG", "stderr")], || {
        let driver = start();
        assert_ne!(make(&driver).0, 0);
        assert!(driver.mem_address_reserve(UNIT, 0, CUdeviceptr(0)).is_ok());
        let never = CUmemGenericAllocationHandle(77);
        assert!(release(&driver, never).is_err());
    });
    if let Some(said) = said {
        let lines: Vec<&str> = said.lines().collect();
        assert_eq!(lines.len(), 2, "{said}");
        assert!(lines[0].contains("]: violation: ") && lines[0].contains("cuMemRelease"), "{said}");
        assert!(lines[1].contains("]: 1 violations; alive: ") && lines[1].contains("reservations: 1"), "{said}");
    }
}
