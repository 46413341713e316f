//! Questions about addresses.

use std::ffi::c_void;

use cuvmm_driver::sys::*;

use super::{Args, Entry, Reply};

pub(super) const TABLE: &[Entry] = &[
    Entry::call("range", range),
    Entry::call("attribute", attribute),
    Entry::call("attributes", attributes),
    Entry::call("set_attribute", set_attribute),
    Entry::call("flush", flush),
];

/// Room for any attribute.
#[repr(C, align(8))]
#[derive(Clone, Copy, Default)]
struct Room([u64; 8]);

fn range(args: &mut Args<'_>) -> Result<Reply, String> {
    let address = args.address()?;
    let (mut base, mut size) = (CUdeviceptr::default(), 0_usize);
    let to_base = args.output_named("base", &mut base)?;
    let to_size = args.output_named("size", &mut size)?;
    let code = call!(args, cuMemGetAddressRange(to_base, to_size, address));
    let mut told = Vec::new();
    if !to_base.is_null() {
        told.push(match base.0 {
            0 => "none".to_owned(),
            base => format!("before={}", address.0.wrapping_sub(base)),
        });
    }
    if !to_size.is_null() {
        told.push(format!("size={size}"));
    }
    Ok(Reply::code(code).tell(told.join(" ")).output(base.0))
}

/// An attribute's value in words: addresses as how far they are before the one asked about.
fn told(attribute: u64, value: u64, address: CUdeviceptr) -> String {
    match attribute {
        // Which context it is, and which block, is another number each time.
        1 | 7 | 20 => (if value == 0 { "none" } else { "some" }).to_owned(),
        3 | 11 | 19 => format!("before={}", address.0.wrapping_sub(value) as i64),
        // The host has no address for what it can't touch.
        4 if value == 0 => "none".to_owned(),
        4 => format!("before={}", address.0.wrapping_sub(value) as i64),
        9 => (value as i32).to_string(),
        _ => value.to_string(),
    }
}

fn attribute(args: &mut Args<'_>) -> Result<Reply, String> {
    let (number, address) = (args.value()?, args.address()?);
    let mut room = Room::default();
    let output = args.output_named("data", &mut room)?;
    let code = call!(args, cuPointerGetAttribute(output.cast::<c_void>(), CUpointer_attribute(number as u32), address));
    let value = room.0[0];
    Ok(Reply::code(code).tell(told(number, value, address)).output(value))
}

fn attributes(args: &mut Args<'_>) -> Result<Reply, String> {
    let address = args.address()?;
    let mut numbers = Vec::new();
    while let Some(word) = args.next_word() {
        numbers.push(args.scene.evaluate(word)?.bits);
    }
    let mut asked: Vec<_> = numbers.iter().map(|&number| CUpointer_attribute(number as u32)).collect();
    let mut rooms = vec![Room::default(); numbers.len()];
    let mut outputs: Vec<*mut c_void> = rooms.iter_mut().map(|room| std::ptr::from_mut(room).cast()).collect();
    let (count, asked, outputs) = (numbers.len() as u32, asked.as_mut_ptr(), outputs.as_mut_ptr());
    let code = call!(args, cuPointerGetAttributes(count, asked, outputs, address));
    let values = numbers.iter().zip(&rooms).map(|(&number, room)| told(number, room.0[0], address));
    Ok(Reply::code(code).tell(values.collect::<Vec<_>>().join(" ")))
}

fn set_attribute(args: &mut Args<'_>) -> Result<Reply, String> {
    let (number, address, value) = (args.value()?, args.address()?, args.value()?);
    let room = Room([value, 0, 0, 0, 0, 0, 0, 0]);
    let input = std::ptr::from_ref(&room).cast::<c_void>();
    Ok(Reply::code(call!(args, cuPointerSetAttribute(input, CUpointer_attribute(number as u32), address))))
}

fn flush(args: &mut Args<'_>) -> Result<Reply, String> {
    let target = CUflushGPUDirectRDMAWritesTarget(args.option("target", 0)? as u32);
    let scope = CUflushGPUDirectRDMAWritesScope(args.option("scope", 100)? as u32);
    Ok(Reply::code(call!(args, cuFlushGPUDirectRDMAWrites(target, scope))))
}
