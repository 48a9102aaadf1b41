# Each layer is one line; `make -k full` runs them all. CI runs the short ones, see .ci/run.
.PHONY: lint test tiers aarch64 serial clang sanitize tsan freethreading valgrind wheel audit docs fuzz full

lint:       ; ci/lint.sh
test:       ; pytest
tiers:      ; ci/tiers.sh
aarch64:    ; ci/aarch64.sh full
serial:     ; ci/serial.sh
clang:      ; ci/clang.sh
sanitize:   ; ci/sanitize.sh
tsan:       ; ci/tsan.sh
freethreading: ; ci/free_threading.sh
valgrind:   ; ci/valgrind.sh
wheel:      ; ci/wheel.sh
audit:      ; python ci/audit_instructions.py
docs:       ; pytest tests/repository/test_docs.py
fuzz:       ; python tests/fuzz/fuzz_cache_file.py && python tests/fuzz/fuzz_api.py && python tests/fuzz/fuzz_caches.py --seconds 3600
full: lint test tiers aarch64 serial clang sanitize tsan freethreading valgrind audit wheel docs fuzz
