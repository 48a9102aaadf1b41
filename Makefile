# Each layer is one line; `make -k full` runs them all. CI runs the short ones, see .ci/run.
.PHONY: lint test exhaustive tiers software_tiers aarch64 windows serial clang sanitize tsan freethreading valgrind llama_cpp wheel audit docs fuzz stores full

lint:       ; ci/lint.sh
# In two processes: most tests are small calls, which one thread makes.
test:       ; pytest -n 2
# Two processes of one thread each are sooner done than one of two. A file stays in one process: its fixtures are made once.
exhaustive: ; KVFAST_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 pytest -m exhaustive -n 2 --dist loadfile
tiers:      ; ci/tiers.sh
software_tiers: ; ci/software_tiers.sh -n 2 tests
aarch64:    ; ci/aarch64.sh full
windows:    ; ci/windows.sh
serial:     ; ci/serial.sh
clang:      ; ci/clang.sh
sanitize:   ; ci/sanitize.sh
tsan:       ; ci/tsan.sh
freethreading: ; ci/free_threading.sh
valgrind:   ; ci/valgrind.sh
llama_cpp:  ; ci/llama_cpp.sh full
wheel:      ; ci/wheel.sh
audit:      ; python ci/audit_instructions.py
docs:       ; pytest tests/repository/test_docs.py
# Eight processes on one folder and on one server, for five minutes each, with kills and evictions.
stores:     ; KVFAST_STORE_SECONDS=300 pytest -q tests/prompts -k "processes"
fuzz:       ; for kind in DamagedWorld CallsWorld ''; do python tests/fuzz/fuzz_caches.py --only "$$kind" --seconds 1800 || exit 1; done
full: lint test exhaustive tiers software_tiers aarch64 windows serial clang sanitize tsan freethreading valgrind llama_cpp audit wheel docs fuzz stores
