//! Modules, their functions, and launching one.
//!
//! # Safety
//! Outputs are ours and read after success only; code and arguments are the callers' promise.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};

use crate::driver::Driver;
use crate::error::Error;
use crate::raw::Call;
use crate::sys::*;

impl Driver {
    /// `cuModuleLoadData`: compiles PTX text and loads it into the current context.
    ///
    /// # Safety
    /// `ptx` is a module's text.
    ///
    /// # Errors
    /// What the driver says of the text; 201 without a current context.
    #[doc(alias = "cuModuleLoadData")]
    pub unsafe fn module_load_data(&self, ptx: &CStr) -> Result<CUmodule, Error> {
        let mut module = CUmodule::NULL;
        // SAFETY: the output is ours, and the text ends in NUL; the caller vouches for what it says.
        let code = unsafe { self.calls()?.cuModuleLoadData(&raw mut module, ptx.as_ptr().cast()) };
        self.check(Call::cuModuleLoadData, code)?;
        Ok(module)
    }

    /// `cuModuleGetFunction`: the module's function of that name, valid as long as the module is loaded.
    ///
    /// # Safety
    /// `module` is loaded, by this driver.
    ///
    /// # Errors
    /// 500 where the module has no such function.
    #[doc(alias = "cuModuleGetFunction")]
    pub unsafe fn module_get_function(&self, module: CUmodule, name: &CStr) -> Result<CUfunction, Error> {
        let mut function = CUfunction::NULL;
        // SAFETY: the output is ours, and the name ends in NUL; the caller vouches for the module.
        let code = unsafe { self.calls()?.cuModuleGetFunction(&raw mut function, module, name.as_ptr()) };
        self.check(Call::cuModuleGetFunction, code)?;
        Ok(function)
    }

    /// `cuModuleUnload`: unloads the module.
    ///
    /// # Safety
    /// `module` is the caller's, and none of its functions runs or will.
    ///
    /// # Errors
    /// What the driver answers.
    #[doc(alias = "cuModuleUnload")]
    pub unsafe fn module_unload(&self, module: CUmodule) -> Result<(), Error> {
        // SAFETY: the caller owns the module.
        let code = unsafe { self.calls()?.cuModuleUnload(module) };
        self.check(Call::cuModuleUnload, code)
    }

    /// `cuLaunchKernel`: queues the function on a grid of blocks. Each of `parameters` points to one argument,
    /// which is read before this returns.
    ///
    /// # Safety
    /// `function` is of a loaded module and `stream` alive, both of this driver; `parameters` has a pointer to a
    /// value of the right type for each parameter; and what the function does with them is allowed until it ends.
    ///
    /// # Errors
    /// 1 for a grid or block that the device can't run; the failure of earlier work.
    #[doc(alias = "cuLaunchKernel")]
    pub unsafe fn launch_kernel(
        &self,
        function: CUfunction,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
        stream: CUstream,
        parameters: &mut [*mut c_void],
    ) -> Result<(), Error> {
        let [grid_x, grid_y, grid_z] = grid;
        let [block_x, block_y, block_z] = block;
        let (parameters, extra) = (parameters.as_mut_ptr(), std::ptr::null_mut());
        // SAFETY: the pointers outlive the call; the caller vouches for the function and what it is given.
        let code = unsafe {
            self.calls()?.cuLaunchKernel(
                function,
                grid_x,
                grid_y,
                grid_z,
                block_x,
                block_y,
                block_z,
                shared_bytes,
                stream,
                parameters,
                extra,
            )
        };
        self.check(Call::cuLaunchKernel, code)
    }
}
