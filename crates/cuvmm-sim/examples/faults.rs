//! Fails every call of a small sequence in turn, on the simulated driver, and shows what each failure leaves behind.
//!
//! Run it with `cargo run -p cuvmm-sim --example faults`.

use cuvmm_driver::sys::*;
use cuvmm_driver::{CUresult, Call, Driver, Error, Hooked};
use cuvmm_sim::{Faults, Machine, Simulator, When};

const SIZE: usize = 2 << 20;

fn main() -> Result<(), Error> {
    println!("on a simulated driver, not a GPU");
    for when in [When::Before, When::After] {
        for call in [Call::cuMemCreate, Call::cuMemAddressReserve, Call::cuMemMap] {
            let faults = Faults::new();
            let simulator = Simulator::new(Machine::h200());
            let driver = Driver::new(Hooked::new(simulator.clone(), faults.clone()))?;
            faults.fail(call, 1, CUresult::OUT_OF_MEMORY, when);
            let error = make_and_unmake(&driver).err();
            let live = simulator.live();
            println!(
                "{when:?} {call}: {}; left: {} allocations, {} reservations, {} mappings",
                error.map_or("no error".into(), |error| error.to_string()),
                live.allocations,
                live.reservations,
                live.mappings
            );
        }
    }
    Ok(())
}

/// A sequence that undoes nothing when it fails, which the table shows.
fn make_and_unmake(driver: &Driver) -> Result<(), Error> {
    let properties = CUmemAllocationProp::pinned(CUmemLocation::device(0), CUmemAllocationHandleType::NONE);
    let memory = driver.mem_create(SIZE, &properties)?;
    let address = driver.mem_address_reserve(SIZE, 0, CUdeviceptr(0))?;
    // SAFETY: both were made just now, and nothing else is mapped there.
    unsafe { driver.mem_map(address, SIZE, memory)? };
    // SAFETY: the mapping is ours, and nothing runs on it.
    unsafe { driver.mem_unmap(address, SIZE)? };
    // SAFETY: nothing is mapped in it any more.
    unsafe { driver.mem_address_free(address, SIZE)? };
    // SAFETY: the reference is ours, and given back once.
    unsafe { driver.mem_release(memory) }
}
