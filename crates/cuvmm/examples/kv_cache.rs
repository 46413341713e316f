//! A cache that grows while its address stays: what an inference engine does with its keys and values. It ends with what
//! the resource counted of it.
//!
//! `cargo run -p cuvmm --example kv_cache` runs on the GPU, and `… -- sim` on the simulator.

use cuvmm::{Driver, Error, Level, Options, Outcome, Release, Statistics, StreamRef, VirtualMemoryResource};
use cuvmm_sim::{Machine, Simulator};

const MIB: usize = 1 << 20;
/// Bytes that one token takes.
const TOKEN: usize = 512 << 10;

fn main() -> Result<(), Error> {
    let driver = match std::env::args().nth(1).as_deref() {
        Some("sim") => Simulator::new(Machine::default()).driver()?,
        _ => Driver::load()?,
    };
    let device = driver.device(0)?;

    // The stream that the engine's kernels run on: whoever lets go of the cache waits for it first.
    let stream = StreamRef::create(&device)?;
    let options = Options::new().release(Release::Stream(stream.clone()));
    let resource = VirtualMemoryResource::new(&device, options)?;

    // Addresses for the longest context there may be; memory for the first tokens alone.
    let mut cache = resource.allocate_with_capacity(64 * MIB, 64 << 30)?;
    println!("{} MiB at {}, room for {} GiB", cache.size() / MIB, cache.address(), cache.capacity() >> 30);

    let mut kernels_hold = cache.address();
    for token in 0..1024_usize {
        let end = (token + 1) * TOKEN;
        if end > cache.size() {
            // Half as much again: few, large chunks are what the driver is fast with.
            let more = cache.size() + cache.size() / 2;
            cache = cache.grow_into(more)?;
            println!(
                "token {token}: {:?}, {} MiB in {} chunks",
                cache.outcome(),
                cache.size() / MIB,
                cache.chunks().len()
            );
            if cache.outcome() == Some(Outcome::Moved) {
                kernels_hold = cache.address();
            }
        }
        // In place of a kernel that appends a token's keys and values.
        cache.fill_on(&stream, token * TOKEN, TOKEN, token as u8)?;
    }
    assert_eq!(kernels_hold, cache.address());

    let mut last = [0; 4];
    cache.copy_to_host_on(&stream, 1024 * TOKEN - 4, &mut last)?;
    assert_eq!(last, [1023_u16 as u8; 4]);
    show(&resource.statistics());
    cache.close()?;
    let end = resource.statistics();
    assert_eq!((end.buffers, end.mapped.now, end.stranded), (0, 0, 0), "nothing is left");
    println!("closed");
    Ok(())
}

fn show(statistics: &Statistics) {
    let Statistics { reserved, mapped, physical, .. } = statistics;
    for (what, Level { now, peak }) in [("reserved", reserved), ("mapped", mapped), ("physical", physical)] {
        println!("{what:>8}: {} MiB, {} at most", now / MIB, peak / MIB);
    }
    let Statistics { grows_in_place, grows_moved, grows_covered, .. } = statistics;
    println!("grown {grows_in_place} times in place, {grows_moved} moved, {grows_covered} covered");
}
