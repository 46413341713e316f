//! Modules and kernels.

use std::ffi::{CString, c_void};

use cuvmm_driver::CUresult;
use cuvmm_driver::sys::*;
use cuvmm_sim::kernels::{FILL, PTX, READ, SPIN};

use super::{Args, Entry, Reply};

pub(super) const TABLE: &[Entry] = &[
    Entry::call("module", module),
    Entry::call("function", function),
    Entry::call("unload", unload),
    Entry::call("launch", launch),
    Entry::call("kernels", kernels),
    Entry::call("fill", fill),
    Entry::call("read", read),
    Entry::call("spin", spin),
];

fn module(args: &mut Args<'_>) -> Result<Reply, String> {
    let image = match args.option_word("image") {
        Some(text) => CString::new(text).map_err(|error| error.to_string())?,
        None => PTX.to_owned(),
    };
    let mut module = CUmodule::NULL;
    let output = args.output(&mut module)?;
    let code = call!(args, cuModuleLoadData(output, image.as_ptr().cast::<c_void>()));
    Ok(Reply::code(code).output(module.0.expose_provenance() as u64))
}

fn function(args: &mut Args<'_>) -> Result<Reply, String> {
    let module = CUmodule(args.pointer()?);
    let name = CString::new(args.word()?).map_err(|error| error.to_string())?;
    let mut function = CUfunction::NULL;
    let output = args.output(&mut function)?;
    let code = call!(args, cuModuleGetFunction(output, module, name.as_ptr()));
    Ok(Reply::code(code).output(function.0.expose_provenance() as u64))
}

fn unload(args: &mut Args<'_>) -> Result<Reply, String> {
    let module = CUmodule(args.pointer()?);
    Ok(Reply::code(call!(args, cuModuleUnload(module))))
}

/// Loads the test kernels in the current context, for `fill`, `read` and `spin`.
fn kernels(args: &mut Args<'_>) -> Result<Reply, String> {
    let mut module = CUmodule::NULL;
    let code = call!(args, cuModuleLoadData(&raw mut module, PTX.as_ptr().cast::<c_void>()));
    if !code.is_success() {
        return Ok(Reply::code(code));
    }
    for (name, symbol) in [("fill", FILL), ("read", READ), ("spin", SPIN)] {
        let mut function = CUfunction::NULL;
        let code = call!(args, cuModuleGetFunction(&raw mut function, module, symbol.as_ptr()));
        if !code.is_success() {
            return Ok(Reply::code(code));
        }
        args.scene.kernels.lock().unwrap().insert(name, function);
    }
    Ok(Reply::code(CUresult::SUCCESS).output(module.0.expose_provenance() as u64))
}

/// The shape of a launch, in one dimension.
struct Shape {
    grid: u32,
    block: u32,
    shared: u32,
}

/// Launches with parameters of which each is at most 64 bits wide. A driver reads as many as the kernel declares: those
/// that the check leaves out are 0.
fn start(args: &Args<'_>, function: CUfunction, stream: CUstream, shape: Shape, mut values: Vec<u64>) -> CUresult {
    /// The most that a test kernel has.
    const PARAMETERS: usize = 3;
    values.resize(values.len().max(PARAMETERS), 0);
    let mut parameters: Vec<*mut c_void> = values.iter_mut().map(|value| std::ptr::from_mut(value).cast()).collect();
    let (parameters, extra) = (parameters.as_mut_ptr(), std::ptr::null_mut());
    let Shape { grid, block, shared } = shape;
    call!(args, cuLaunchKernel(function, grid, 1, 1, block, 1, 1, shared, stream, parameters, extra))
}

fn launch(args: &mut Args<'_>) -> Result<Reply, String> {
    let (function, stream) = (CUfunction(args.pointer()?), args.stream()?);
    let shape = Shape {
        grid: args.option("grid", 1)? as u32,
        block: args.option("block", 1)? as u32,
        shared: args.option("shared", 0)? as u32,
    };
    let mut values = Vec::new();
    while let Some(word) = args.next_word() {
        values.push(args.scene.evaluate(word)?.bits);
    }
    Ok(Reply::code(start(args, function, stream, shape, values)))
}

/// Launches one of the test kernels.
fn start_named(args: &Args<'_>, name: &str, stream: CUstream, block: u32, values: Vec<u64>) -> Result<Reply, String> {
    let function = args.scene.kernels.lock().unwrap().get(name).copied().ok_or("no `kernels` before it")?;
    Ok(Reply::code(start(args, function, stream, Shape { grid: 1, block, shared: 0 }, values)))
}

fn fill(args: &mut Args<'_>) -> Result<Reply, String> {
    let (stream, address, value, count) = (args.stream()?, args.value()?, args.value()?, args.value()?);
    start_named(args, "fill", stream, 64, vec![address, value, count])
}

fn read(args: &mut Args<'_>) -> Result<Reply, String> {
    let (stream, source, destination, count) = (args.stream()?, args.value()?, args.value()?, args.value()?);
    start_named(args, "read", stream, 64, vec![source, destination, count])
}

fn spin(args: &mut Args<'_>) -> Result<Reply, String> {
    /// What a check may let a kernel run on.
    const MOST: u64 = 2_000_000_000;
    let (stream, nanoseconds) = (args.stream()?, args.value()?);
    let address = args.option("at", 0)?;
    if nanoseconds > MOST {
        return Err("a kernel spins for 2 s at most".to_owned());
    }
    start_named(args, "spin", stream, 1, vec![address, nanoseconds])
}
