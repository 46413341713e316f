//! Grows a buffer three times: in place, within what it has, and by moving, with its bytes kept each time.
//!
//! `cargo run -p cuvmm-resource --example grow`

use cuvmm_resource::{Options, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_sim::{Machine, Simulator};

const MIB: usize = 1 << 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let simulator = Simulator::new(Machine::h200());
    let resource = VirtualMemoryResource::new(&simulator.driver()?.device(0)?, Options::new())?;

    let first = resource.allocate_with_capacity(2 * MIB, 512 * MIB)?;
    first.copy_from_host(0, b"kept")?;
    show("allocated", &first)?;

    // Within the capacity the address stays, so kernels may use the memory meanwhile.
    let larger = first.grow(256 * MIB)?;
    show("grown", &larger)?;

    // What is asked for is there already: the same memory once more, without a driver call.
    let same = larger.grow(128 * MIB)?;
    show("grown again", &same)?;

    // The addresses behind the first are the larger one's now: what grows there besides has to move. Both go on.
    let other = first.grow(256 * MIB)?;
    show("grown beside", &other)?;

    for buffer in [first, larger, same, other] {
        buffer.close()?;
    }
    println!("left: {} mappings, {} MiB of memory", simulator.live().mappings, simulator.physical_bytes(0) / MIB);
    Ok(())
}

fn show(what: &str, buffer: &VirtualMemoryBuffer) -> Result<(), cuvmm_resource::Error> {
    let mut bytes = [0; 4];
    buffer.copy_to_host(0, &mut bytes)?;
    let (size, chunks) = (buffer.size() / MIB, buffer.chunks().len());
    let text = String::from_utf8_lossy(&bytes);
    println!("{what:12} {:?}: {size} MiB at {} in {chunks} chunks: {text:?}", buffer.outcome(), buffer.address());
    Ok(())
}
