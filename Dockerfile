# Container image of patchloom without root's rights; docs/how-to/docker.md has the commands for CPU and GPU.
FROM python:3.12-slim AS build

# The address that torch comes from. Left empty it is the registry's usual one, whose torch is for CUDA.
ARG TORCH_INDEX=""
# Extras of pyproject.toml, with commas between.
ARG EXTRAS="audio,dense,dicom,heic"
# Of the release that is built, since git's history is not copied.
ARG VERSION=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

RUN python -m venv /opt/patchloom
# both from one place, since one for CUDA does not load beside one without; and before the code, so that a change of it
# costs no second download
RUN /opt/patchloom/bin/pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch>=2.11" "torchvision>=0.26"
COPY pyproject.toml README.md LICENSE /source/
COPY src /source/src
# alone, since other packages that may have to be built would take the version for theirs
RUN SETUPTOOLS_SCM_PRETEND_VERSION="$VERSION" /opt/patchloom/bin/pip wheel --no-deps --wheel-dir /wheel /source
RUN /opt/patchloom/bin/pip install "$(echo /wheel/*.whl)${EXTRAS:+[$EXTRAS]}"

FROM python:3.12-slim

ARG VERSION=""
LABEL org.opencontainers.image.title="patchloom" \
      org.opencontainers.image.description="Pre-train vision transformers on your own unlabelled images" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION"

# Packages of Debian. g++ makes native kernels, and lets torch.compile work; without it torch's kernels do.
ARG PACKAGES=""
RUN if [ -n "$PACKAGES" ]; then \
        apt-get update && apt-get install --yes --no-install-recommends $PACKAGES && rm -rf /var/lib/apt/lists/*; \
    fi

RUN useradd --uid 1000 patchloom
# Whoever runs it with --user has no name and no home here: both are given, and folders that all may write to.
RUN mkdir --mode 1777 /cache /work
COPY --from=build /opt/patchloom /opt/patchloom
ENV PATH=/opt/patchloom/bin:$PATH USER=patchloom HOME=/cache XDG_CACHE_HOME=/cache MPLCONFIGDIR=/cache/matplotlib \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor TRITON_CACHE_DIR=/cache/triton

USER patchloom
WORKDIR /work
ENTRYPOINT ["patchloom"]
CMD ["--help"]
