#pragma once
// Enumerations of metal-cpp, with Apple's values.
#include "Foundation/Foundation.hpp"

namespace MTL {

enum DispatchType : NS::UInteger { DispatchTypeSerial = 0, DispatchTypeConcurrent = 1 };

enum BarrierScope : NS::UInteger { BarrierScopeBuffers = 1, BarrierScopeTextures = 2, BarrierScopeRenderTargets = 4 };

enum StorageMode : NS::UInteger {
  StorageModeShared = 0,
  StorageModeManaged = 1,
  StorageModePrivate = 2,
  StorageModeMemoryless = 3,
};

enum HazardTrackingMode : NS::UInteger {
  HazardTrackingModeDefault = 0,
  HazardTrackingModeUntracked = 1,
  HazardTrackingModeTracked = 2,
};

enum ResourceOptions : NS::UInteger {
  ResourceCPUCacheModeDefaultCache = 0,
  ResourceCPUCacheModeWriteCombined = 1,
  ResourceStorageModeShared = 0,
  ResourceStorageModeManaged = 1 << 4,
  ResourceStorageModePrivate = 2 << 4,
  ResourceHazardTrackingModeDefault = 0,
  ResourceHazardTrackingModeUntracked = 1 << 8,
  ResourceHazardTrackingModeTracked = 2 << 8,
};
constexpr ResourceOptions operator|(ResourceOptions a, ResourceOptions b) {
  return static_cast<ResourceOptions>(static_cast<NS::UInteger>(a) | static_cast<NS::UInteger>(b));
}

enum ResourceUsage : NS::UInteger { ResourceUsageRead = 1, ResourceUsageWrite = 2, ResourceUsageSample = 4 };
constexpr ResourceUsage operator|(ResourceUsage a, ResourceUsage b) {
  return static_cast<ResourceUsage>(static_cast<NS::UInteger>(a) | static_cast<NS::UInteger>(b));
}

enum GPUFamily : NS::Integer {
  GPUFamilyApple1 = 1001,
  GPUFamilyApple2 = 1002,
  GPUFamilyApple3 = 1003,
  GPUFamilyApple4 = 1004,
  GPUFamilyApple5 = 1005,
  GPUFamilyApple6 = 1006,
  GPUFamilyApple7 = 1007,
  GPUFamilyApple8 = 1008,
  GPUFamilyApple9 = 1009,
  GPUFamilyApple10 = 1010,
  GPUFamilyMac1 = 2001,
  GPUFamilyMac2 = 2002,
  GPUFamilyCommon1 = 3001,
  GPUFamilyCommon2 = 3002,
  GPUFamilyCommon3 = 3003,
  GPUFamilyMetal3 = 5001,
  GPUFamilyMetal4 = 5002,
};

enum LanguageVersion : NS::UInteger {
  LanguageVersion3_0 = 196608,
  LanguageVersion3_1 = 196609,
  LanguageVersion3_2 = 196610,
  LanguageVersion4_0 = 262144,
};

enum MathMode : NS::Integer { MathModeSafe = 0, MathModeRelaxed = 1, MathModeFast = 2 };

enum MathFloatingPointFunctions : NS::Integer {
  MathFloatingPointFunctionsFast = 0,
  MathFloatingPointFunctionsPrecise = 1,
};

enum PipelineOption : NS::UInteger { PipelineOptionNone = 0, PipelineOptionArgumentInfo = 1 };

enum FunctionType : NS::UInteger { FunctionTypeVertex = 1, FunctionTypeFragment = 2, FunctionTypeKernel = 3 };

enum CommandBufferStatus : NS::UInteger {
  CommandBufferStatusNotEnqueued = 0,
  CommandBufferStatusEnqueued = 1,
  CommandBufferStatusCommitted = 2,
  CommandBufferStatusScheduled = 3,
  CommandBufferStatusCompleted = 4,
  CommandBufferStatusError = 5,
};

enum CommandBufferError : NS::UInteger {
  CommandBufferErrorNone = 0,
  CommandBufferErrorInternal = 1,
  CommandBufferErrorTimeout = 2,
  CommandBufferErrorPageFault = 3,
  CommandBufferErrorAccessRevoked = 4,
  CommandBufferErrorNotPermitted = 7,
  CommandBufferErrorOutOfMemory = 8,
  CommandBufferErrorInvalidResource = 9,
  CommandBufferErrorMemoryless = 10,
  CommandBufferErrorDeviceRemoved = 11,
  CommandBufferErrorStackOverflow = 12,
};

enum CommandBufferErrorOption : NS::UInteger {
  CommandBufferErrorOptionNone = 0,
  CommandBufferErrorOptionEncoderExecutionStatus = 1,
};

enum CounterSamplingPoint : NS::UInteger {
  CounterSamplingPointAtStageBoundary = 0,
  CounterSamplingPointAtDrawBoundary = 1,
  CounterSamplingPointAtDispatchBoundary = 2,
  CounterSamplingPointAtTileDispatchBoundary = 3,
  CounterSamplingPointAtBlitBoundary = 4,
};

enum DataType : NS::UInteger {
  DataTypeNone = 0,
  DataTypeFloat = 3,
  DataTypeFloat2 = 4,
  DataTypeFloat3 = 5,
  DataTypeFloat4 = 6,
  DataTypeHalf = 16,
  DataTypeInt = 29,
  DataTypeUInt = 33,
  DataTypeShort = 37,
  DataTypeUShort = 41,
  DataTypeChar = 45,
  DataTypeUChar = 49,
  DataTypeBool = 53,
  DataTypeLong = 81,
  DataTypeULong = 85,
  DataTypeBFloat = 121,
};

}  // namespace MTL
