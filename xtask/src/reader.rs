//! The reader of this program's output, who may close it early.

/// Ends quietly if the reader of our output has closed it (`cargo xtask bench | head`), which makes `println!` panic.
pub fn end_with_it() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let text = panic.payload().downcast_ref::<String>();
        if text.is_some_and(|text| text.starts_with("failed printing to stdout: Broken pipe")) {
            std::process::exit(141); // as the signal would have it: 128 + SIGPIPE
        }
        usual(panic);
    }));
}
